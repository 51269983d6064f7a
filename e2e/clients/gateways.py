"""An LLMService with gateway pods, and an LLMGateway, with a client's pod that connects to the gateways."""

from __future__ import annotations

import json
from typing import Any

from clients.service import Service, is_ready


class GatewayedService(Service):
    """A Service whose clients connect to its gateway pods."""

    suffix = "gateway"  # suffix of the names of the gateways' objects, and of the label of gateway pods

    @property
    def url(self) -> str:
        """The base URL of the gateways for clients in the cluster."""
        return f"http://{self.name}-{self.suffix}.{self.namespace}.svc.cluster.local:8000"

    def gateways(self) -> list[dict[str, Any]]:
        """The service's gateway pods, without terminating pods."""
        selector = f"rayloom.dev/{self.suffix}={self.name}"
        found = self.kubectl.json("get", "pods", "--namespace", self.namespace, "--selector", selector)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def has_gateways(self, number: int, *, but_not: set[str] | None = None) -> bool:
        """True if exactly this number of gateway pods exist, all are ready, and none has a uid in `but_not`."""
        pods = self.gateways()
        return len(pods) == number and all(map(is_ready, pods)) and not (but_not or set()) & uids(pods)


class ModelsGateway(GatewayedService):
    """An LLMGateway. It has no engines of its own."""

    suffix = "llmgateway"

    def get(self) -> dict[str, Any]:
        document: dict[str, Any] = self.kubectl.json("get", "llmgateway", self.name, "--namespace", self.namespace)
        return document

    def gateway_urls(self) -> list[str]:
        """The base URL of each gateway pod."""
        return [f"http://{pod['status']['podIP']}:8000" for pod in self.gateways()]

    def names_at(self, url: str) -> list[str]:
        """The names that the gateways at this URL serve, in alphabetical order."""
        status, body = self.client.request(f"{url}/v1/models")
        return sorted(each["id"] for each in json.loads(body)["data"]) if status == 200 else []

    def has_names(self, *names: str) -> bool:
        """True when each gateway pod serves exactly these names."""
        urls = self.gateway_urls()
        return bool(urls) and all(self.names_at(url) == sorted(names) for url in urls)


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}
