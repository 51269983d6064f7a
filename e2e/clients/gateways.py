"""An LLMService with gateway pods, seen from a client's pod that connects to the gateways."""

from __future__ import annotations

from typing import Any

from clients.service import Service, is_ready


class GatewayedService(Service):
    """A Service whose clients connect to its gateway pods."""

    @property
    def url(self) -> str:
        """The base URL of the gateways for clients in the cluster."""
        return f"http://{self.name}-gateway.{self.namespace}.svc.cluster.local:8000"

    def gateways(self) -> list[dict[str, Any]]:
        """Its gateway pods, without terminating ones."""
        selector = f"rayloom.dev/gateway={self.name}"
        found = self.kubectl.json("get", "pods", "--namespace", self.namespace, "--selector", selector)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def has_gateways(self, number: int, *, but_not: set[str] | None = None) -> bool:
        """True if exactly this number of gateway pods exist, all are ready, and none has a uid in `but_not`."""
        pods = self.gateways()
        return len(pods) == number and all(map(is_ready, pods)) and not (but_not or set()) & uids(pods)


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}
