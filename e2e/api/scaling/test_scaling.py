"""The operator's scaler on a real API server: load, its end, a rollout, and other writers of `replicas`.

The tests' operator averages loads over 10 s. The engines are simulated, and tell the load that a test sets.
"""

from __future__ import annotations

import json
import time
from typing import Any

from api.namespaces import llm_service
from api.scaling.scaled_service import ScaledService
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import LLM, World
from simulated_nodes.pod_status import Release

SCALING = {"minReplicas": 1, "maxReplicas": 4}
NEVER = "acme/engine:never-serves"
SCALER = "rayloom-operator-scaler"


class Scaled(ScaledService):
    """An autoscaled service whose engines all have the same load."""

    def __init__(self, world: World, namespace: str, **spec: Any) -> None:
        self._spec = {"autoscaling": SCALING, **spec}
        super().__init__(world, namespace, **self._spec)

    def load(self, **figures: int) -> None:
        for cluster in self.world.engines_of(self.namespace, "chat"):
            self.world.engine(self.namespace, "chat", cluster, load=figures)

    def apply(self, **spec: Any) -> None:
        self._spec |= spec
        self.world.create(llm_service(self.namespace, "chat", **self._spec))

    def wait_all(self, replicas: int, timeout_s: float = 60.0) -> None:
        """Returns once the scaler asks for this number of engines, and all of them serve."""
        ready = f"{replicas}/{replicas}"
        self.wait(lambda: self.replicas == replicas, f"{replicas} replicas", timeout_s)
        self.wait(lambda: self.document["status"]["ready"] == ready, f"{ready} engines", timeout_s)

    def events(self) -> list[str]:
        found = self.world.request("GET", f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        return [each["reason"] for each in found if each["regarding"].get("name") == "chat"]


def test_replicas_follow_the_load_up_and_down(world: World, operator: OperatorProcess, namespace: str) -> None:
    it = Scaled(world, namespace)
    # 2000 tokens take 2 s; half of the goal is 1 s. So the load is two fully used engines, which is three at 70 %.
    it.load(queued_tokens=2000)
    it.wait(lambda: it.replicas == 3, "three replicas")
    assert it.scaling["reason"] == "ScaledUp"
    assert (it.scaling["inputs"]["queuedTokens"], it.scaling["inputs"]["neededEngines"]) == (2000, "2.00")
    # The first look that shows the load averages it with the idle one before, so there may be two engines for a moment.
    assert "-> 3: the load takes 2.00 fully used engines (2000 tokens wait, 0 run;" in it.scaling["message"]
    it.load()
    it.wait_all(3)
    it.wait_all(1, 120)
    assert it.scaling["reason"] == "ScaledDown"
    assert it.scaling["startSeconds"] >= 1
    it.wait(lambda: {"ScaledUp", "ScaledDown"} <= set(it.events()), "an Event of each change", 20)
    managers = {
        each["manager"]
        for each in it.document["metadata"]["managedFields"]
        if each.get("subresource") == "scale" and "f:replicas" in json.dumps(each["fieldsV1"])
    }
    assert managers == {SCALER}
    assert 'rayloom_operator_scalings_total{direction="up"}' in operator.scrape()


def test_a_rollout_is_not_disturbed(world: World, operator: OperatorProcess, namespace: str) -> None:
    world.ship(NEVER, Release(engine={"state": "starting"}))
    it = Scaled(world, namespace, replicas=2)
    it.wait_all(2)
    it.apply(engine={"image": NEVER})
    it.wait(lambda: it.scaling.get("reason") == "RollingOut", "the scaler to wait for the rollout")
    it.load(queued_tokens=9000)
    assert it.stays(8)


def test_a_paused_rollout_stops_no_scaling(world: World, operator: OperatorProcess, namespace: str) -> None:
    world.ship(NEVER, Release(engine={"state": "starting"}))
    it = Scaled(world, namespace)
    it.apply(engine={"image": NEVER}, rollout={"paused": True})
    world.wait(namespace, "chat", "Progressing", "Paused")
    it.load(queued_tokens=2000)
    it.wait(lambda: it.replicas == 3, "three replicas")
    it.load()
    it.wait_all(3)
    revisions = {name.split("-")[1] for name in world.objects(namespace, "chat", "rayclusters")}
    assert revisions == {it.document["status"]["currentRevision"]}


def test_users_and_other_autoscalers_write_within_the_bounds(
    world: World, operator: OperatorProcess, namespace: str, kubectl: Kubectl
) -> None:
    it = Scaled(world, namespace)
    kubectl("scale", "llm/chat", "--replicas=2", f"--namespace={namespace}")
    it.wait(lambda: it.scaling.get("reason") == "OtherWriter", "the writer in the status")
    assert it.scaling["writer"] == "kubectl"
    assert it.stays(5)
    it.wait_all(1, 120)  # the next decision
    kubectl("scale", "llm/chat", "--replicas=9", f"--namespace={namespace}")
    it.wait(lambda: it.replicas == 4, "the bound")
    it.wait(lambda: it.scaling["reason"] == "Bounded", "the reason")
    kubectl("scale", "llm/chat", "--replicas=0", f"--namespace={namespace}")
    it.wait(lambda: it.scaling["reason"] == "Suspended", "a suspended service")
    assert it.stays(5)


def test_without_autoscaling_nobody_but_the_user_writes(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    world.create(llm_service(namespace, "chat", replicas=1))
    world.wait_serving(namespace, "chat", 60)
    world.engine(namespace, "chat", load={"queued_tokens": 9000})
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 6, "some looks at the engine")
    found = world.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/chat")
    assert found["spec"]["replicas"] == 1
    assert "autoscaling" not in found["status"]
