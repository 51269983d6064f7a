"""The operator's scaler on a real API server: rising and falling load, a rollout, and other writers of `replicas`.

The tests' operator averages loads over 10 s. The engines are simulated, and report the load that a test sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from api.namespaces import llm_service
from api.parallel_tests import ParallelTests, parallel_test
from api.scaling.scaled_service import ScaledService, Setting, parallel_scaling
from operator_processes.process import wait_until
from rayloom_operator.times import moment
from real_api_server.world import LLM, World
from simulated_nodes.pod_status import Release

SCALING = {"minReplicas": 1, "maxReplicas": 4}
NEVER = "acme/engine:never-serves"
SCALER = "rayloom-operator-scaler"


class Scaled(ScaledService):
    """An autoscaled service whose engines all have the same load."""

    def __init__(self, setting: Setting, **spec: Any) -> None:
        self._spec = {"autoscaling": SCALING, **spec}
        super().__init__(setting, **self._spec)

    def load(self, **figures: int) -> None:
        for cluster in self.world.engines_of(self.namespace, "chat"):
            self.world.engine(self.namespace, "chat", cluster, load=figures)

    def apply(self, **spec: Any) -> None:
        self._spec |= spec
        self.world.create(llm_service(self.namespace, "chat", **self._spec))

    def wait_all(self, replicas: int) -> None:
        """Returns once the scaler asks for this number of engines, and all of them serve."""
        ready = f"{replicas}/{replicas}"
        self.wait(lambda: self.replicas == replicas, f"{replicas} replicas")
        self.wait(lambda: self.document["status"]["ready"] == ready, f"{ready} engines")

    def events(self) -> list[str]:
        found = self.world.request("GET", f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        return [each["reason"] for each in found if each["regarding"].get("name") == "chat"]


@pytest.fixture(scope="module")
def started_tests(world: World, request: pytest.FixtureRequest) -> Iterator[ParallelTests]:
    yield from parallel_scaling(world, request)


@parallel_test
def test_replicas_follow_the_load_up_and_down(at: Setting) -> None:
    it = Scaled(at)
    # 2000 tokens take 2 s, and may take half of the latency goal, 1 s. So the load is two fully used engines, or three
    # at 70 %.
    it.load(queued_tokens=2000)
    it.wait(lambda: it.replicas == 3, "three replicas")
    # The first sample of the load is averaged with the idle sample before it, so there may be two engines for a moment.
    says = "-> 3: the load takes 2.00 fully used engines (2000 tokens wait, 0 run;"
    up = it.wait_scaled("ScaledUp", says)
    assert (up["inputs"]["queuedTokens"], up["inputs"]["neededEngines"]) == (2000, "2.00")
    it.wait_all(3)
    it.load()
    it.wait_all(1)
    assert it.wait_scaled("ScaledDown")["startSeconds"] >= 1
    it.wait(lambda: {"ScaledUp", "ScaledDown"} <= set(it.events()), "an Event of each change")
    managers = {
        each["manager"]
        for each in it.document["metadata"]["managedFields"]
        if each.get("subresource") == "scale" and "f:replicas" in json.dumps(each["fieldsV1"])
    }
    assert managers == {SCALER}
    it.wait(lambda: 'rayloom_operator_scalings_total{direction="up"}' in at.operator.scrape(), "the metric")


@parallel_test
def test_a_rollout_is_not_disturbed(at: Setting) -> None:
    at.world.ship(NEVER, Release(engine={"state": "starting"}))
    # If the minimum were one engine, the scaler might remove an idle engine before the rollout begins.
    it = Scaled(at, replicas=2, autoscaling=SCALING | {"minReplicas": 2})
    it.wait_all(2)
    it.apply(engine={"image": NEVER})
    it.wait_scaled("RollingOut")
    it.load(queued_tokens=9000)
    assert it.stays(8)


@parallel_test
def test_a_paused_rollout_stops_no_scaling(at: Setting) -> None:
    at.world.ship(NEVER, Release(engine={"state": "starting"}))
    it = Scaled(at)
    it.apply(engine={"image": NEVER}, rollout={"paused": True})
    at.world.wait(at.namespace, "chat", "Progressing", "Paused")
    it.load(queued_tokens=2000)
    it.wait_all(3)
    revisions = {name.split("-")[1] for name in at.world.objects(at.namespace, "chat", "rayclusters")}
    assert revisions == {it.document["status"]["currentRevision"]}


@parallel_test
def test_users_and_other_autoscalers_write_within_the_bounds(at: Setting) -> None:
    it = Scaled(at)
    at.kubectl("scale", "llm/chat", "--replicas=2", f"--namespace={at.namespace}")
    written = it.wait_scaled("OtherWriter")
    assert written["writer"] == "kubectl"
    it.wait_all(1)  # the next decision
    decided = it.wait_scaled("ScaledDown")
    # The next decision needs 10 s of samples since the write. Times in the status are whole seconds, so 9 s suffice.
    assert moment(decided["lastScaleTime"]) - moment(written["lastScaleTime"]) >= timedelta(seconds=9)
    at.kubectl("scale", "llm/chat", "--replicas=9", f"--namespace={at.namespace}")
    it.wait(lambda: it.replicas == 4, "the bound")
    it.wait_scaled("Bounded")
    at.kubectl("scale", "llm/chat", "--replicas=0", f"--namespace={at.namespace}")
    it.wait_scaled("Suspended")
    assert it.stays(5)


@parallel_test
def test_without_autoscaling_nobody_but_the_user_writes(at: Setting) -> None:
    at.world.create(llm_service(at.namespace, "chat", replicas=1))
    at.world.wait_serving(at.namespace, "chat")
    at.world.engine(at.namespace, "chat", load={"queued_tokens": 9000})
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 6, "some looks at the engine")
    found = at.world.request("GET", f"{LLM}/namespaces/{at.namespace}/llmservices/chat")
    assert found["spec"]["replicas"] == 1
    assert "autoscaling" not in found["status"]
