"""TLS between pods on a real API server: objects with TLS, objects that stay unchanged, and renewed certificates."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.namespaces import llm_service
from operator_processes.process import wait_until
from real_api_server.world import World
from simulated_nodes.api_client import Document

_ENGINES, _GATEWAYS = "chat-engines-tls-", "chat-gateway-tls-"


class Behind:
    """A service with a gateway, and the Secrets with its certificates on the API server."""

    def __init__(self, world: World, namespace: str) -> None:
        self.world = world
        self.namespace = namespace

    def apply(self, **spec: Any) -> None:
        rollout = {"analysis": {"holdSeconds": 1}}
        self.world.create(llm_service(self.namespace, "chat", gateway={"replicas": 1}, rollout=rollout, **spec))

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, f"{self.namespace}: {what}", story=self.world.story)

    def restart_operator(self, *flags: str) -> None:
        self.world.stop_operators()
        self.world.take_lease()
        self.world.start_operator(*flags)

    def secrets(self) -> dict[str, Document]:
        """Beginning of the name -> Secret with a certificate."""
        found = self.world.objects(self.namespace, "chat", "secrets").values()
        return {
            each["metadata"]["name"][:-8]: each
            for each in found
            if each["metadata"]["name"].startswith((_ENGINES, _GATEWAYS))
        }

    def authorities(self, name: str) -> int:
        """The number of CAs that the pods with this Secret trust."""
        return base64.b64decode(self.secrets()[name]["data"]["ca.crt"]).count(b"BEGIN CERTIFICATE")

    def clusters(self) -> dict[str, set[str]]:
        """UID of each RayCluster -> beginnings of the names of the Secrets that its head mounts."""
        found = self.world.objects(self.namespace, "chat", "rayclusters").values()
        return {each["metadata"]["uid"]: _mounted(_head(each)) for each in found}

    def gateway_pods(self) -> list[Document]:
        found = self.world.pods(self.namespace, "chat")
        return [each for each in found if "rayloom.dev/gateway" in each["metadata"]["labels"]]

    def gateway_config(self) -> Document:
        deployment = self.world.objects(self.namespace, "chat", "deployments")["Deployment/chat-gateway"]
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        found: Document = json.loads(annotations["rayloom.dev/gateway-config"])
        return found


def _head(cluster: Document) -> Document:
    found: Document = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    return found


def _mounted(pod: Document) -> set[str]:
    sources = [each for volume in pod["volumes"] for each in volume.get("projected", {}).get("sources", ())]
    return {each["secret"]["name"][:-8] for each in sources if "secret" in each}


def test_tls_replaces_gateway_pods_and_no_engine_and_certificates_are_renewed(
    world: World, namespace: str, tmp_path: Path
) -> None:
    it = Behind(world, namespace)
    image = "--engine-image=rayloom/engine:1"
    try:
        it.restart_operator(image)
        it.apply()
        world.wait_serving(namespace, "chat")
        it.wait(lambda: "Deployment/chat-gateway" in world.objects(namespace, "chat", "deployments"), "a gateway")
        before = it.clusters()
        assert it.secrets() == {}
        assert "tls_mode" not in it.gateway_config()

        it.restart_operator(image, "--pod-tls=permissive")
        it.wait(lambda: it.gateway_config().get("tls_mode") == "permissive", "gateway pods with certificates")
        it.wait(lambda: set(it.secrets()) == {_ENGINES, _GATEWAYS}, "two Secrets")
        assert {each["type"] for each in it.secrets().values()} == {"kubernetes.io/tls"}
        assert it.clusters() == before, "TLS starts no rollout"

        it.apply(engine={"image": "rayloom/engine:2"})
        it.wait(lambda: it.clusters() and not it.clusters().keys() & before.keys(), "a new engine in place of the old")
        assert all(_ENGINES in mounted for mounted in it.clusters().values())
        world.wait_serving(namespace, "chat")

        versions = {name: each["metadata"]["resourceVersion"] for name, each in it.secrets().items()}
        it.restart_operator(image, "--pod-tls=strict")
        it.wait(lambda: it.gateway_config()["tls_mode"] == "strict", "strict gateway pods")
        found = {name: each["metadata"]["resourceVersion"] for name, each in it.secrets().items()}
        assert found == versions, "the same certificates are written once"

        name = it.secrets()[_GATEWAYS]["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        content = world.request("GET", path)["data"]
        world.delete(path)
        for pod in it.gateway_pods():
            world.delete(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}")
        it.wait(lambda: _GATEWAYS in it.secrets(), "the deleted Secret, for which a pod waits")
        assert it.secrets()[_GATEWAYS]["data"] == content

        uid = it.secrets()[_ENGINES]["metadata"]["uid"]
        previous = tmp_path / "previous"
        previous.write_text("the key of the operator before this one")
        it.restart_operator(image, "--pod-tls=strict", f"--previous-key-file={previous}")
        it.wait(lambda: it.authorities(_ENGINES) == it.authorities(_GATEWAYS) == 2, "both CAs")
        assert it.secrets()[_ENGINES]["metadata"]["uid"] == uid, "it is changed and not created again"
    finally:
        world.stop_operators()
        world.take_lease()
