"""`spec.gateway.route` on a real API server: HTTPRoute and Ingress, with the status that a controller writes.

The Gateway API's own CRD is installed during the tests. The tests write the status in place of a controller.
"""

from __future__ import annotations

from typing import Any

from api import gateway_api
from api.gateway.route_answer import HTTP_ROUTE, answer, take_ingress
from api.namespaces import llm_service
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import World
from simulated_nodes.api_client import MERGE, Document

_INGRESS = {
    "ingress": {
        "className": "traefik",
        "host": "llm.example.com",
        "path": "/v1",
        "tlsSecretName": "llm-tls",
        "annotations": {"cert-manager.io/issuer": "x"},
    }
}
_STARTED = {"replicas": 1}


class Routed:
    """A service with a gateway, and its route on the API server."""

    def __init__(self, world: World, namespace: str, route: Document) -> None:
        self.world = world
        self.namespace = namespace
        self.http = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes/chat-gateway"
        self.ingress = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/ingresses/chat-gateway"
        self.ask(route)
        world.wait_serving(namespace, "chat")

    def ask(self, route: Document | None) -> None:
        gateway = _STARTED | ({"route": route} if route is not None else {})
        self.world.create(llm_service(self.namespace, "chat", gateway=gateway))

    @property
    def status(self) -> Document:
        service = self.world.services[(self.namespace, "chat")]
        found: Document = service.get("status", {}).get("gateway", {}).get("route", {})
        return found

    def wait_reason(self, reason: str) -> None:
        wait_until(lambda: self.status.get("reason") == reason, f"the reason {reason}", story=lambda: str(self.status))

    def wait_for(self, path: str, **spec: Any) -> Document:
        def is_there() -> bool:
            found = self.world.get(path)
            return found is not None and found["spec"].items() >= spec.items()

        wait_until(is_there, f"{path} with {spec}", story=lambda: f"{self.world.get(path)}\n{self.status}")
        return self.world.request("GET", path)

    def wait_gone(self, path: str) -> None:
        wait_until(lambda: self.world.get(path) is None, f"the end of {path}", story=lambda: str(self.status))


def test_an_http_route_is_made_once_the_cluster_has_the_kind_and_follows_the_spec(
    world: World, operator: OperatorProcess, namespace: str, kubectl: Kubectl, without_routes: None
) -> None:
    it = Routed(world, namespace, HTTP_ROUTE)
    it.wait_reason("GatewayApiMissing")
    world.wait(namespace, "chat", "Degraded", "GatewayApiMissing", "httproutes.gateway.networking.k8s.io")
    assert world.condition(namespace, "chat", "Available")["status"] == "True"
    gateway_api.install(world, kubectl)
    it.wait_reason("Pending")
    made = it.wait_for(it.http, hostnames=["llm.example.com"])
    assert made["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
    assert made["spec"]["rules"][0]["backendRefs"][0]["name"] == "chat-gateway"
    wait_until(lambda: it.status.get("url") == "https://llm.example.com/v1", "the URL in the status")

    answer(world, it.http, "True", "Accepted")
    it.wait_reason("Accepted")
    world.wait(namespace, "chat", "Degraded", "Healthy")
    answer(world, it.http, "False", "NotAllowedByListeners", "no listener allows this namespace")
    says = "Gateway public in namespace edge does not accept the HTTPRoute: NotAllowedByListeners"
    world.wait(namespace, "chat", "Degraded", "RouteNotAccepted", says)
    assert world.condition(namespace, "chat", "Available")["status"] == "True"

    world.request("PATCH", it.http, {"spec": {"hostnames": ["other.example.com"]}}, content_type=MERGE)
    it.wait_for(it.http, hostnames=["llm.example.com"])
    world.delete(it.http)
    uid = it.wait_for(it.http, hostnames=["llm.example.com"])["metadata"]["uid"]
    assert uid != made["metadata"]["uid"]

    it.ask(_INGRESS)
    entry = it.wait_for(it.ingress, ingressClassName="traefik")
    assert world.get(it.http), "no controller has accepted the Ingress yet"
    take_ingress(world, it.ingress)
    it.wait_gone(it.http)
    assert entry["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}]
    wait_until(lambda: it.status.get("kind") == "Ingress", "the Ingress in the status")
    assert it.status["url"] == "https://llm.example.com/v1"
    it.ask(None)
    it.wait_gone(it.ingress)
    wait_until(lambda: not it.status, "the end of status.gateway.route")


def test_an_ingress_is_kept_restored_and_left_to_its_controller(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = Routed(world, namespace, _INGRESS)
    it.wait_reason("Pending")
    it.wait_for(it.ingress)
    take_ingress(world, it.ingress)
    it.wait_reason("Accepted")
    assert "192.0.2.7" in it.status["message"]
    # Another program's annotation stays, and the annotation of the manifest is restored.
    marks = {"metadata": {"annotations": {"cert-manager.io/issuer": "edited", "example.com/theirs": "y"}}}
    world.request("PATCH", it.ingress, marks, content_type=MERGE)
    wanted = {"cert-manager.io/issuer": "x", "example.com/theirs": "y"}
    wait_until(lambda: world.request("GET", it.ingress)["metadata"]["annotations"] == wanted, "the annotations")
    before = world.request("GET", it.ingress)["metadata"]["resourceVersion"]
    world.stop_operators()
    world.start_operator()
    world.create(llm_service(namespace, "chat", gateway={"replicas": 2, "route": _INGRESS}))
    wait_until(lambda: _replicas(world, namespace) == 2, "the new operator's first write")
    assert world.request("GET", it.ingress)["metadata"]["resourceVersion"] == before


def test_another_owners_ingress_is_never_written(world: World, operator: OperatorProcess, namespace: str) -> None:
    backend = {"service": {"name": "theirs", "port": {"number": 80}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    theirs = {"metadata": {"name": "chat-gateway"}, "spec": {"rules": [{"http": {"paths": paths}}]}}
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/ingresses"
    before = world.request("POST", path, theirs)["metadata"]["resourceVersion"]
    it = Routed(world, namespace, _INGRESS)
    world.wait(namespace, "chat", "Degraded", "RouteRefused", "the Ingress chat-gateway exists and is not ours")
    assert world.request("GET", it.ingress)["metadata"]["resourceVersion"] == before
    it.ask(None)
    world.wait(namespace, "chat", "Degraded", "Healthy")
    assert world.request("GET", it.ingress)["metadata"]["resourceVersion"] == before


def _replicas(world: World, namespace: str) -> Any:
    return world.services[(namespace, "chat")]["status"].get("gateway", {}).get("replicas")
