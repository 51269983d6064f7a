"""`spec.gateway` on a real API server: real Deployment, disruption and EndpointSlice controllers, simulated pods."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from typing import Any

from api.namespaces import forbid_pods, llm_service
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.traffic import ready_addresses
from real_api_server.world import World
from simulated_nodes.api_client import MERGE, Document
from simulated_nodes.pod_status import RUN, Play

_OF_PODS = {"Deployment/chat-gateway", "Service/chat-gateway", "PodDisruptionBudget/chat-gateway"}


class Behind:
    """A service with gateways, and its objects on the API server."""

    def __init__(self, world: World, namespace: str, **spec: Any) -> None:
        self.world = world
        self.namespace = namespace
        self._spec = spec
        world.create(llm_service(namespace, "chat", **spec))
        world.wait_serving(namespace, "chat")

    def apply(self, **spec: Any) -> None:
        self._spec = {name: value for name, value in (self._spec | spec).items() if value is not None}
        self.world.create(llm_service(self.namespace, "chat", **self._spec))

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, f"{self.namespace}: {what}", story=self._story)

    def wait_ready(self, number: int) -> None:
        """Returns once this number of gateways is ready, and the Deployment controller counts them as well."""
        self.wait(lambda: (self.gateway.get("ready"), self.gateway.get("reason")) == (number, "Ready"), "all gateways")

    @property
    def status(self) -> Document:
        found: Document = self.world.services[(self.namespace, "chat")]["status"]
        return found

    @property
    def gateway(self) -> Document:
        found: Document = self.status.get("gateway", {})
        return found

    @property
    def objects(self) -> dict[str, Document]:
        """Objects of the gateway: kind/name -> object. The Secret's name is cut to the part that all tests share."""
        found = self.world.objects(self.namespace, "chat", "services", "secrets", "deployments", "poddisruptionbudgets")
        ours = {name: each for name, each in found.items() if "/chat-gateway" in name or "/chat-engines" in name}
        return {("Secret/key" if name.startswith("Secret/") else name): each for name, each in ours.items()}

    def clusters(self) -> set[str]:
        return set(self.world.objects(self.namespace, "chat", "rayclusters"))

    def pods(self) -> list[Document]:
        found = self.world.pods(self.namespace, "chat")
        return [each for each in found if "rayloom.dev/gateway" in each["metadata"]["labels"]]

    def addresses(self, service: str) -> set[str]:
        """The ready addresses in a Service's EndpointSlices.

        Clients get them from DNS if the Service is headless, and else through kube-proxy.
        """
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        label = f"kubernetes.io/service-name={service}"
        found = self.world.request("GET", path, labelSelector=label)["items"]
        return {address for each in found for address in ready_addresses(each)}

    def _story(self) -> str:
        status = json.dumps(self.world.services.get((self.namespace, "chat"), {}).get("status"), indent=1)
        return f"{status}\n{self.world.story()}"


def test_clients_and_gateways_find_what_they_need(world: World, operator: OperatorProcess, namespace: str) -> None:
    it = Behind(world, namespace, gateway={"replicas": 2})
    it.wait_ready(2)
    assert it.status["endpoint"] == f"http://chat-gateway.{namespace}.svc:8000"
    assert it.gateway["replicas"] == 2
    assert set(it.objects) == _OF_PODS | {"Service/chat-engines", "Secret/key"}
    uid = world.services[(namespace, "chat")]["metadata"]["uid"]
    assert {each["metadata"]["ownerReferences"][0]["uid"] for each in it.objects.values()} == {uid}
    # kube-controller-manager fills the EndpointSlices, from which DNS and kube-proxy get their addresses.
    (engine,) = [each for each in world.pods(namespace, "chat") if _is_head(each)]
    it.wait(lambda: it.addresses("chat-engines") == {engine["status"]["podIP"]}, "the engine in DNS")
    it.wait(lambda: it.addresses("chat-gateway") == {each["status"]["podIP"] for each in it.pods()}, "the endpoints")
    it.wait(lambda: it.addresses("chat") == {engine["status"]["podIP"]}, "the endpoint of clients without a gateway")
    config = world.objects(namespace, "chat", "configmaps").popitem()[1]["data"]["config.json"]
    assert json.loads(config)["front_port"] == 8003
    assert {each["spec"]["nodeName"] for each in it.pods()} == {"standin-a", "standin-b"}


def test_what_somebody_changes_or_deletes_is_as_before(world: World, operator: OperatorProcess, namespace: str) -> None:
    it = Behind(world, namespace, gateway={"replicas": 1})
    it.wait_ready(1)
    clusters = it.clusters()
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/chat-gateway"
    world.request("PATCH", deployment, {"spec": {"replicas": 5}}, content_type=MERGE)
    it.wait(lambda: it.objects["Deployment/chat-gateway"]["spec"]["replicas"] == 1, "one pod")
    engines = f"/api/v1/namespaces/{namespace}/services/chat-engines"
    world.request("PATCH", engines, {"spec": {"publishNotReadyAddresses": False}}, content_type=MERGE)
    it.wait(
        lambda: it.objects["Service/chat-engines"]["spec"].get("publishNotReadyAddresses"),
        "unready pods",
    )
    for path in (
        deployment,
        engines,
        f"/api/v1/namespaces/{namespace}/services/chat-gateway",
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/chat-gateway",
    ):
        uid = world.request("GET", path)["metadata"]["uid"]
        world.delete(path)

        def is_another(path: str = path, uid: str = uid) -> bool:
            found = world.get(path)
            return found is not None and found["metadata"]["uid"] != uid

        it.wait(is_another, f"{path} to come back")
    it.wait_ready(1)
    assert it.clusters() == clusters


def test_a_deleted_key_comes_back_the_same(world: World, operator: OperatorProcess, namespace: str) -> None:
    it = Behind(world, namespace, gateway={"replicas": 1})
    it.wait_ready(1)
    secret = it.objects["Secret/key"]
    assert len(base64.b64decode(secret["data"]["key"])) == 64
    world.delete(f"/api/v1/namespaces/{namespace}/secrets/{secret['metadata']['name']}")
    (pod,) = it.pods()
    world.delete(f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}")
    it.wait(lambda: "Secret/key" in it.objects, "the Secret, for which a pod waits")
    assert it.objects["Secret/key"]["data"] == secret["data"]
    it.wait(lambda: all(each["metadata"]["uid"] != pod["metadata"]["uid"] for each in it.pods()), "the old pod's end")
    it.wait_ready(1)


def test_changes_of_the_gateway_restart_no_engine(world: World, operator: OperatorProcess, namespace: str) -> None:
    it = Behind(world, namespace, gateway={"replicas": 2})
    it.wait_ready(2)
    clusters, pods = it.clusters(), {each["metadata"]["uid"] for each in it.pods()}
    it.apply(gateway={"replicas": 1, "holdSeconds": 60, "resources": {"limits": {"memory": "1Gi"}}})
    it.wait(lambda: (it.gateway["replicas"], it.gateway["ready"]) == (1, 1), "one gateway")

    def new_pods() -> list[Document]:
        found = it.pods()
        return [] if {each["metadata"]["uid"] for each in found} & pods else found

    it.wait(lambda: len(new_pods()) == 1, "a new pod")
    (pod,) = new_pods()
    assert json.loads(pod["metadata"]["annotations"]["rayloom.dev/gateway-config"])["hold_seconds"] == 60
    it.apply(gateway={"replicas": 0})
    it.wait(lambda: set(it.objects) == {"Service/chat-engines", "Secret/key"}, "the end of the pods' objects")
    it.wait(lambda: it.status["endpoint"] == f"http://chat.{namespace}.svc:8000", "the engines' URL")
    it.wait(lambda: it.gateway["reason"] == "Off", "the reason")
    assert it.clusters() == clusters


def test_a_running_service_gets_gateways_and_loses_them(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    rollout = {"analysis": {"holdSeconds": 1}}
    it = Behind(world, namespace, rollout=rollout)
    direct, through = f"http://chat.{namespace}.svc:8000", f"http://chat-gateway.{namespace}.svc:8000"
    assert (it.status["endpoint"], it.objects) == (direct, {})
    assert "gateway" not in it.status
    before = it.clusters()
    world.play(namespace, "chat", "gateway", Play(is_never_ready=True))
    it.apply(gateway={"replicas": 1})
    it.wait(lambda: it.status["progress"] == "Complete" and not it.clusters() & before, "new engines")
    # No gateway is ready yet, so status.endpoint stays.
    assert it.status["endpoint"] == direct
    assert world.condition(namespace, "chat", "Available")["status"] == "True"
    world.play(namespace, "chat", "gateway", RUN)
    it.wait(lambda: it.status["endpoint"] == through, "the gateways' URL")
    after = it.clusters()
    it.apply(gateway=None)
    it.wait(lambda: it.status["endpoint"] == direct, "the engines' URL")
    it.wait(lambda: not it.clusters() & after, "engines without a port for gateways")
    it.wait(lambda: not it.objects and "gateway" not in it.status, "the end of all objects")


def test_the_status_tells_what_clients_of_a_gateway_get(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = Behind(world, namespace, gateway={"replicas": 1})
    it.wait_ready(1)
    world.play(namespace, "chat", "gateway", Play(is_never_ready=True))
    world.wait(namespace, "chat", "Available", "GatewayNotReady")
    assert it.status["ready"] == "1/1"
    it.wait(lambda: it.gateway["reason"] == "Starting", "the reason")
    world.play(namespace, "chat", "gateway", Play(waiting=("ImagePullBackOff", "no such image")))
    world.wait(namespace, "chat", "Degraded", "ImagePullFailed", "Check spec.gateway.image")
    world.play(namespace, "chat", "gateway", RUN)
    world.wait(namespace, "chat", "Available", "Serving")
    world.wait(namespace, "chat", "Degraded", "Healthy")


def test_the_status_tells_an_update_that_does_not_end_and_a_pod_that_is_refused(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = Behind(world, namespace, gateway={"replicas": 1})
    it.wait_ready(1)
    world.play(namespace, "chat", "gateway", Play(is_never_ready=True))
    it.apply(gateway={"replicas": 1, "holdSeconds": 60})
    it.wait(lambda: it.gateway["reason"] == "Updating", "an update")
    it.wait(
        lambda: "1 of 1 gateway pods have the new settings, and 1 have former ones" in it.gateway["message"], "pods"
    )
    world.play(namespace, "chat", "gateway", RUN)
    it.wait_ready(1)
    quota = forbid_pods(world, namespace)
    it.apply(gateway={"replicas": 2, "holdSeconds": 60})
    world.wait(namespace, "chat", "Degraded", "ContainerFailed", "exceeded quota: no-pods")
    it.wait(lambda: "exceeded quota: no-pods" in it.gateway["message"], "the refusal")
    world.delete(quota)
    it.apply(gateway={"replicas": 1, "holdSeconds": 60})
    world.wait(namespace, "chat", "Degraded", "Healthy")


def test_a_restarted_operator_writes_none_of_the_objects(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = Behind(world, namespace, gateway={"replicas": 2})
    it.wait_ready(2)
    before = {name: each["metadata"]["resourceVersion"] for name, each in it.objects.items() if name in _SPECS}
    generation = it.objects["Deployment/chat-gateway"]["metadata"]["generation"]
    world.stop_operators()
    world.start_operator()
    it.apply(gateway={"replicas": 1})
    it.wait(lambda: it.gateway.get("replicas") == 1, "the new operator's first write")
    assert {name: each["metadata"]["resourceVersion"] for name, each in it.objects.items() if name in _SPECS} == before
    assert it.objects["Deployment/chat-gateway"]["metadata"]["generation"] == generation + 1


def test_a_restarted_operator_writes_nothing_if_nothing_has_changed(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    it = Behind(world, namespace, gateway={"replicas": 2})
    it.wait_ready(2)
    # A change of a message alone is written up to 5 s later.
    it.wait(lambda: time.monotonic() - operator.proxy.writes(namespace)[-1].at > _LAST_WRITE_S, "the last write")
    world.stop_operators()
    world.take_lease()
    began = time.monotonic()
    successor = world.start_operator()

    def has_reconciled() -> bool:
        found = re.findall(r"(?m)^rayloom_operator_(reconcile_total|queue_depth)\S* (\S+)$", successor.scrape())
        num_reconciles = sum(float(number) for name, number in found if name == "reconcile_total")
        return num_reconciles >= len(world.services) and ("queue_depth", "0.0") in found

    it.wait(has_reconciled, "a reconcile of each service")
    writes = [f"{each.method} {each.path}" for each in successor.proxy.writes(namespace, began)]
    assert writes == []


# Seconds after the last write to a service in its final state.
_LAST_WRITE_S = 6.0
# Objects whose status no controller writes.
_SPECS = ("Service/chat-gateway", "Service/chat-engines", "Secret/key")


def _is_head(pod: Document) -> bool:
    return bool(pod["metadata"]["labels"].get("ray.io/node-type") == "head")
