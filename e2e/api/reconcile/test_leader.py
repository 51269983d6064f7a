"""Leader election of two operators: one works, the other waits, and the two never write at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operator_processes.process import PATIENCE_S, OperatorProcess, wait_for, wait_until
from real_api_server.world import DEFAULT_FLAGS, LLM, World

Make = Callable[..., dict[str, Any]]

_LEASE = "/apis/coordination.k8s.io/v1/namespaces/rayloom-system/leases/rayloom-operator"
# The Lease lasts longer than the default of 6 s. So a leader keeps the Lease if the machine pauses for some seconds,
# and a leader that stops has time to release it.
_LONG_LEASE = "--lease-seconds=30"


@pytest.fixture
def pair(world: World, request: pytest.FixtureRequest) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """(the leader, the waiting operator). A parameter is an additional flag of both operators."""
    # Without this wait, a new leader would first reconcile terminating services of earlier tests.
    world.operator()
    wait_until(lambda: not world.services, "services of earlier tests to be gone", 240, world.story)
    world.stop_operators()
    world.take_lease()
    flags = (*DEFAULT_FLAGS, getattr(request, "param", "--lease-seconds=6"))
    both = world.start_operator(*flags), world.start_operator(*flags)
    leaders = wait_for(lambda: [each for each in both if _leads(each)], "a leader", story=world.story)
    yield both if leaders[0] is both[0] else both[::-1]
    world.stop_operators()
    world.take_lease()


def _leads(operator: OperatorProcess) -> bool:
    return "\nrayloom_operator_leader 1" in operator.scrape()


@pytest.mark.parametrize("pair", [_LONG_LEASE], indirect=True)
def test_the_one_that_waits_writes_nothing(
    pair: tuple[OperatorProcess, OperatorProcess], world: World, namespace: str, manifest: Make
) -> None:
    leader, other = pair
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    assert leader.proxy.writes(namespace)
    assert other.proxy.writes() == []


def test_a_killed_leader_is_followed_once_its_lease_of_six_seconds_ends(
    pair: tuple[OperatorProcess, OperatorProcess], world: World, namespace: str, manifest: Make
) -> None:
    leader, other = pair
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    pods = {each["metadata"]["uid"] for each in world.pods(namespace, "chat")}
    leader.kill()
    world.create(manifest("second"))
    seconds = wait_until(lambda: other.proxy.writes("second"), "the other one to write", story=world.story)
    world.wait_serving(namespace, "second")
    print(f"taken over after {seconds:.1f} s")
    assert {each["metadata"]["uid"] for each in world.pods(namespace, "chat")} == pods


@pytest.mark.parametrize("pair", [_LONG_LEASE], indirect=True)
def test_a_leader_that_is_asked_to_stop_hands_over_at_once(
    pair: tuple[OperatorProcess, OperatorProcess], world: World, namespace: str, manifest: Make
) -> None:
    leader, other = pair
    holder = world.request("GET", _LEASE)["spec"]["holderIdentity"]
    leader.process.terminate()
    world.create(manifest())
    assert leader.process.wait(PATIENCE_S) == 0
    assert world.request("GET", _LEASE)["spec"].get("holderIdentity") != holder, "it was not released"
    wait_until(lambda: other.proxy.writes(namespace), "the other one to write", story=world.story)
    world.wait_serving(namespace, "chat")


def test_a_leader_that_stood_still_for_twenty_seconds_changes_nothing_any_more(
    pair: tuple[OperatorProcess, OperatorProcess], world: World, namespace: str, manifest: Make
) -> None:
    leader, other = pair
    world.create(manifest("old"))
    world.wait_serving(namespace, "old")
    leader.pause()
    paused_at = time.monotonic()
    # A service is created, another is changed, and one is deleted. If the old leader still led after its pause, it
    # would write for each of these changes.
    world.create(manifest("new"))
    world.create(manifest("old", engine={"args": {"threads": 2}}))
    wait_until(lambda: other.proxy.writes("new"), "the other one to write", story=world.story)
    # Requests that the old leader sent before its pause may have arrived since. Only later requests count.
    taken_over_at = time.monotonic()
    world.wait_serving(namespace, "new")
    world.wait_serving(namespace, "old")
    world.request("DELETE", f"{LLM}/namespaces/{namespace}/llmservices/new")
    wait_until(lambda: time.monotonic() - paused_at > 20, "twenty seconds to pass")
    resumed_at = time.monotonic()
    leader.resume()
    wait_until(lambda: not leader.is_alive, "the end of the old leader, which finds another", story=leader.story)
    wait_until(lambda: time.monotonic() - resumed_at > 3, "the old leader's running requests")
    # An Event that was due at the pause may still be created. It changes no object.
    writes = leader.proxy.writes(since=taken_over_at)
    assert [each for each in writes if not each.path.endswith("/events")] == []
    world.wait_serving(namespace, "old")
