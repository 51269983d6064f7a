"""LLMGateways on a real API server: its checks, controllers, garbage collector and rights; simulated pods."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from api import gateway_api
from api.gateway.route_answer import HTTP_ROUTE, answer, take_ingress
from api.namespaces import llm_service
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import MERGE, ApiError, Document

_KINDS = {
    "services": "/api/v1",
    "serviceaccounts": "/api/v1",
    "secrets": "/api/v1",
    "deployments": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
}
_DIGEST = "rayloom.dev/secrets"
_LABELS = {"public": "yes"}
_SELECTOR = {"matchLabels": _LABELS}
_INGRESS = {"ingress": {"host": "llm.example.com", "path": "/v1", "tlsSecretName": "llm-tls"}}


class PublicGateway:
    """An LLMGateway, and its objects on the API server."""

    def __init__(self, world: World, namespace: str) -> None:
        self.world = world
        self.namespace = namespace
        self.path = f"{LLM}/namespaces/{namespace}/llmgateways/public"

    def apply(self, **spec: Any) -> Document:
        meta = {"name": "public", "namespace": self.namespace}
        manifest = {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMGateway", "metadata": meta, "spec": spec}
        return self.world.request(
            "PATCH",
            self.path,
            manifest,
            content_type="application/apply-patch+yaml",
            fieldManager="test",
            force="true",
            fieldValidation="Strict",
        )

    def serve(self, name: str, **spec: Any) -> None:
        service = llm_service(self.namespace, name, gateway={"replicas": 0}, **spec)
        service["metadata"]["labels"] = {**service["metadata"].get("labels", {}), **_LABELS}
        self.world.create(service)

    @property
    def status(self) -> Document:
        found: Document = self.world.request("GET", self.path).get("status", {})
        return found

    @property
    def route(self) -> Document:
        found: Document = self.status.get("route", {})
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        found = {each["type"]: (each["status"], each["reason"]) for each in self.status.get("conditions", ())}
        return found.get(kind, ("", ""))

    def states(self, part: str = "models") -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.status.get(part, ())}

    def objects(self) -> dict[str, Document]:
        found = {}
        for plural, api in _KINDS.items():
            path = f"{api}/namespaces/{self.namespace}/{plural}"
            for each in self.world.request("GET", path, labelSelector="rayloom.dev/llmgateway=public")["items"]:
                found[plural] = each
        return found

    def is_read(self) -> bool:
        """True when both pods say that they have read the list of models in the Secret."""
        data = self.objects()["secrets"]["data"]["models.json"]
        present = hashlib.sha256(base64.b64decode(data)).hexdigest()[:16]
        read = [(each["models"], each["modelsHash"]) for each in self.status.get("pods", ())]
        return self.status.get("modelsHash") == present and read == [("Current", present)] * 2

    def names(self) -> set[str]:
        data = self.objects()["secrets"]["data"]["models.json"]
        return set(json.loads(base64.b64decode(data))["models"])

    def pods(self) -> set[str]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self.world.request("GET", path, labelSelector="rayloom.dev/llmgateway=public")["items"]
        return {each["metadata"]["uid"] for each in found}

    def annotations(self) -> dict[str, str]:
        """The annotations of the ServiceAccount."""
        found: dict[str, str] = self.objects()["serviceaccounts"]["metadata"].get("annotations", {})
        return found

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, f"{self.namespace}: {what}", story=lambda: json.dumps(self.status, indent=1))

    def wait_condition(self, kind: str, status: str, reason: str) -> None:
        self.wait(lambda: self.condition(kind) == (status, reason), f"{kind} with reason {reason}")


def test_one_url_follows_its_services_and_rolls_nothing(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = PublicGateway(world, namespace)
    targets = [{"service": "chat", "weight": 90}, {"service": "chat-next", "weight": 10}]
    it.serve("chat")
    it.apply(services=_SELECTOR, aliases=[{"name": "assistant", "targets": targets}])
    world.wait_serving(namespace, "chat")
    it.wait_condition("Available", "True", "Serving")
    it.wait_condition("Progressing", "False", "Complete")
    assert set(it.objects()) == set(_KINDS)
    assert it.status["endpoint"] == f"http://public-llmgateway.{namespace}.svc:8000"
    it.wait(lambda: (it.status["ready"], it.status["serving"]) == ("2/2", "1/1"), "the numbers")
    assert it.names() == {"chat"}
    it.wait_condition("Degraded", "True", "TargetMissing")
    pods = it.pods()
    # A second service, and then one without the port for gateways.
    it.serve("chat-next")
    it.wait(lambda: it.states() == {"chat": "Serving", "chat-next": "Serving"}, "two services")
    it.wait_condition("Degraded", "False", "Healthy")
    bare = llm_service(namespace, "bare")
    bare["metadata"]["labels"] = _LABELS
    world.create(bare)
    it.wait(lambda: it.states().get("bare") == "Absent", "a service without the port")
    it.wait_condition("Degraded", "True", "NoGatewayPort")
    world.delete(f"{LLM}/namespaces/{namespace}/llmservices/bare")
    # The service loses the label.
    path = f"{LLM}/namespaces/{namespace}/llmservices/chat-next"
    world.request("PATCH", path, {"metadata": {"labels": {"public": None}}}, content_type=MERGE)
    it.wait(lambda: it.names() == {"chat"}, "one service again")
    it.wait(it.is_read, "the pods have read the last list")
    assert it.pods() == pods
    policy = world.request("GET", f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/chat-rayloom")
    assert any("rayloom.dev/llmgateway" in json.dumps(each.get("from")) for each in policy["spec"]["ingress"])


def test_a_name_belongs_to_one_service_and_an_alias_joins_no_different_keys(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = PublicGateway(world, namespace)
    it.serve("chat")
    it.serve("keyed", auth={"apiKeySecretRef": {"name": "keys", "key": "all"}})
    targets = [{"service": "chat"}, {"service": "keyed"}]
    it.apply(services=_SELECTOR, replicas=1, aliases=[{"name": "assistant", "targets": targets}])
    it.wait_condition("Degraded", "True", "KeysDiffer")
    it.wait(lambda: it.states("aliases") == {"assistant": "Absent"}, "the alias")
    it.apply(services=_SELECTOR, replicas=1)
    it.wait_condition("Degraded", "False", "Healthy")
    it.serve("twin", model={"source": "builtin://smollm2-135m", "servedName": "chat"})
    it.wait_condition("Degraded", "True", "NameConflict")

    def owners() -> list[tuple[str, str]]:
        return [(each["service"], each["state"]) for each in it.status["models"] if each["name"] == "chat"]

    it.wait(lambda: len(owners()) == 2 and ("twin", "Absent") in owners(), "both services of the name")


def test_what_somebody_changes_is_restored_and_a_deletion_leaves_nothing(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = PublicGateway(world, namespace)
    it.apply(services=_SELECTOR, replicas=1)
    it.wait_condition("Available", "False", "NoModels")
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/public-llmgateway"
    world.request("PATCH", deployment, {"spec": {"replicas": 5}}, content_type=MERGE)
    it.wait(lambda: it.objects()["deployments"]["spec"]["replicas"] == 1, "one pod")
    world.delete(f"/api/v1/namespaces/{namespace}/services/public-llmgateway")
    it.wait(lambda: "services" in it.objects(), "the Service")
    # Nobody but the operator's digest tells that the Secret exists.
    found, secrets = it.objects(), f"/api/v1/namespaces/{namespace}/secrets"
    world.delete(f"{secrets}/{found['secrets']['metadata']['name']}")
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/public-llmgateway"
    world.request("PATCH", account, {"metadata": {"annotations": {_DIGEST: None, "team": "a"}}}, content_type=MERGE)
    it.wait(lambda: it.objects().get("secrets", {}).get("data") == found["secrets"]["data"], "the Secret")
    digest = found["serviceaccounts"]["metadata"]["annotations"][_DIGEST]
    it.wait(lambda: it.annotations() == {_DIGEST: digest, "team": "a"}, "the digest")
    world.request("DELETE", it.path, {"propagationPolicy": "Background"})
    wait_until(lambda: not it.objects() and not it.pods(), f"{namespace}: everything is gone")


def test_a_restarted_operator_writes_the_secret_only_after_a_change_and_then_its_digest(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = PublicGateway(world, namespace)
    it.serve("chat")
    it.apply(services=_SELECTOR, replicas=1)
    world.wait_serving(namespace, "chat")
    it.wait_condition("Progressing", "False", "Complete")
    before = it.annotations()
    world.stop_operators()
    world.take_lease()
    successor = world.start_operator()
    it.serve("chat-next")
    it.wait(lambda: it.names() == {"chat", "chat-next"}, "two services")
    it.wait(lambda: it.annotations().get(_DIGEST) not in ("", None, before[_DIGEST]), "another digest")
    writes = [(each.method, each.path.split("/")[-2]) for each in successor.proxy.writes("/public-llmgateway")]
    ours = [each for each in writes if each[1] in ("secrets", "serviceaccounts")]
    assert ours == [("PATCH", "serviceaccounts"), ("PUT", "secrets"), ("PATCH", "serviceaccounts")]


def test_a_route_leads_to_the_url_and_ends_with_it(
    world: World, operator: OperatorProcess, namespace: str, kubectl: Kubectl, without_routes: None
) -> None:
    it = PublicGateway(world, namespace)
    name = f"namespaces/{namespace}"
    http = f"/apis/gateway.networking.k8s.io/v1/{name}/httproutes/public-llmgateway"
    entry = f"/apis/networking.k8s.io/v1/{name}/ingresses/public-llmgateway"
    it.apply(services=_SELECTOR, replicas=1, route=HTTP_ROUTE)
    it.wait_condition("Degraded", "True", "GatewayApiMissing")
    gateway_api.install(world, kubectl)
    it.wait(lambda: it.route.get("reason") == "Pending" and world.get(http), "the HTTPRoute")
    made = world.request("GET", http)
    assert made["spec"]["rules"][0]["backendRefs"][0]["name"] == "public-llmgateway"
    answer(world, http, "False", "NotAllowedByListeners", "no listener allows this namespace")
    it.wait_condition("Degraded", "True", "RouteNotAccepted")
    answer(world, http, "True", "Accepted")
    it.wait(lambda: it.route.get("accepted") is True, "the answer")
    it.wait_condition("Degraded", "False", "Healthy")
    world.request("PATCH", http, {"spec": {"hostnames": ["other.example.com"]}}, content_type=MERGE)
    it.wait(lambda: world.request("GET", http)["spec"] == made["spec"], "the host name")

    it.apply(services=_SELECTOR, replicas=1, route=_INGRESS)
    it.wait(lambda: world.get(entry) is not None, "the Ingress")
    assert world.get(http), "no controller has accepted the Ingress yet"
    take_ingress(world, entry)
    it.wait(lambda: not world.get(http), "the Ingress alone")
    assert world.request("GET", entry)["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}]
    it.wait(lambda: it.route.get("kind") == "Ingress", "the Ingress in the status")
    assert it.route["url"] == "https://llm.example.com/v1"
    world.request("DELETE", it.path, {"propagationPolicy": "Background"})
    wait_until(lambda: not world.get(entry), f"{namespace}: the end of the Ingress")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "spec.services: Required value"),
        ({"services": {}}, "an empty selector selects nothing"),
        ({"services": {"matchExpressions": [{"key": "a", "operator": "In"}]}}, "In and NotIn need values"),
        ({"services": _SELECTOR, "replicas": 17}, "use 0 to 16 gateway pods"),
        ({"services": _SELECTOR, "route": {}}, "give exactly one of httpRoute and ingress"),
        ({"services": _SELECTOR, "route": HTTP_ROUTE, "replicas": 0}, "raise replicas to 1 or more, or remove route"),
        (
            {"services": _SELECTOR, "aliases": [{"name": "a", "targets": []}]},
            "an alias without targets cannot answer requests",
        ),
        (
            {"services": _SELECTOR, "aliases": [{"name": "a", "targets": [{"service": "b", "weight": 0}]}]},
            "raise the weight of at least one",
        ),
        (
            {"services": _SELECTOR, "aliases": [{"name": "a", "targets": [{"service": "b", "weight": 1001}]}]},
            "use a weight from 0 to 1000",
        ),
        ({"services": _SELECTOR, "resources": {"limits": {"nvidia.com/gpu": "1"}}}, "a gateway uses cpu, memory"),
    ],
)
def test_the_api_server_refuses_a_mistake_with_a_sentence(
    world: World, namespace: str, spec: Document, sentence: str
) -> None:
    with pytest.raises(ApiError, match=sentence):
        PublicGateway(world, namespace).apply(**spec)
