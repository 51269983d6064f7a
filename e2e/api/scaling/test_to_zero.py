"""Scaling to zero on a real API server: engines end when there are no requests, and start again for held requests.

Gateway pods come from a real Deployment. Their status answers are simulated, and a test sets the numbers of requests in
these answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api.parallel_tests import ParallelTests, parallel_test
from api.scaling.scaled_service import ScaledService, Setting, parallel_scaling
from real_api_server.world import World
from simulated_nodes.api_client import MERGE
from simulated_nodes.gateways import Gateway

_SPEC: dict[str, Any] = {
    "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "idleSeconds": 10},
    "gateway": {"replicas": 2},
}


class Idle(ScaledService):
    """A service that has two gateways and may be scaled to zero engines."""

    def __init__(self, setting: Setting, **autoscaling: int) -> None:
        super().__init__(setting, **_SPEC | {"autoscaling": _SPEC["autoscaling"] | autoscaling})

    @property
    def gateways(self) -> list[Gateway]:
        return list(self.world.gateways_of(self.namespace, "chat").values())

    def wait_for_zero(self) -> None:
        """Returns once no engine exists."""
        self.wait(lambda: self.replicas == 0, "no replicas")
        self.wait(lambda: not self.world.objects(self.namespace, "chat", "rayclusters"), "no engine")

    def change(self, gateway: Gateway, **fields: int) -> None:
        """Sets fields of a gateway's status. Returns when the operator has read the new values."""
        self.world.change(gateway, **fields)
        asked = gateway.num_asked
        self.wait(lambda: gateway.num_asked > asked + 1, "the gateway to be asked")


@pytest.fixture(scope="module")
def started_tests(world: World, request: pytest.FixtureRequest) -> Iterator[ParallelTests]:
    yield from parallel_scaling(world, request)


@parallel_test
def test_to_zero_without_requests_and_back_for_held_ones(at: Setting) -> None:
    it = Idle(at, idleSeconds=600)
    it.wait(lambda: len(it.gateways) == 2, "two gateways")
    streaming, held = it.gateways
    it.change(streaming, in_flight=1)
    # The short `idleSeconds` is set only now: `change` has returned, so the operator has read the status with the
    # stream. If it had been set earlier, the operator might have removed the engine at once.
    soon = {"spec": {"autoscaling": {"idleSeconds": 10}}}
    at.world.request("PATCH", it.path, soon, content_type=MERGE)
    assert it.stays(25), "a stream keeps the engine"
    it.change(streaming, in_flight=0)
    it.wait_for_zero()
    it.wait_scaled("ScaledToZero")
    found = at.world.wait(at.namespace, "chat", "Available", "ScaledToZero")
    assert found["status"] == "False"
    it.wait(lambda: it.document["status"]["gateway"]["ready"] == 2, "both gateways")
    # 3000 tokens take one engine 3 s at the rate that it had, and may take 1 s. So three engines are needed, or five at
    # 70 %.
    at.world.change(held, num_held=2, held_tokens=3000)
    it.wait(lambda: it.replicas == 4, "as many engines as maxReplicas allows")
    woken = it.wait_scaled("Woken")
    assert (woken["inputs"]["heldRequests"], woken["inputs"]["heldTokens"]) == (2, 3000)
    it.wait(lambda: it.document["status"]["ready"] == "4/4", "the engines")


@parallel_test
def test_a_recreated_gateway_gets_its_tokenizer_from_a_woken_engine(at: Setting) -> None:
    it = Idle(at)
    it.wait_for_zero()
    pod = next(iter(at.world.gateways_of(at.namespace, "chat")))
    at.world.request("DELETE", f"/api/v1/namespaces/{at.namespace}/pods/{pod}")
    it.wait(lambda: it.replicas == 1, "an engine")
    it.wait_scaled("Woken", "a gateway pod has no tokenizer")
    it.wait(lambda: it.document["status"]["gateway"]["ready"] == 2, "both gateways")
    it.wait_for_zero()


@parallel_test
def test_a_service_that_a_user_suspended_is_not_woken(at: Setting) -> None:
    it = Idle(at, idleSeconds=600)
    at.kubectl("scale", "llm/chat", "--replicas=0", f"--namespace={at.namespace}")
    it.wait_scaled("Suspended")
    it.wait(lambda: len(it.gateways) == 2, "two gateways")
    for each in it.gateways:
        it.change(each, num_held=1, held_tokens=500)
    assert it.stays(10)
    at.world.wait(at.namespace, "chat", "Available", "Suspended")
