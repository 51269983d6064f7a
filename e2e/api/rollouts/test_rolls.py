"""Changes of a running service, and their effects on its clients, its engines and its status.

In most tests clients send requests. Such a request may fail only in the test of a release that fails requests. Restarts
of the operator during a rollout are in test_rollout_restarts.py, node drains in test_node_drains.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from api.parallel_tests import ParallelTests, parallel_test
from api.rollouts.rolling import (
    ANALYSIS,
    BEST,
    BETTER,
    CRASHES,
    FAILS,
    GOOD,
    LONG,
    NEVER,
    SLOW,
    Service,
    parallel_rolls,
    went_by_the_book,
)
from local_kubernetes.machine.kubectl import Kubectl
from real_api_server.traffic import Traffic
from real_api_server.world import World
from simulated_nodes.engines import Engine


@pytest.fixture(scope="module")
def started_tests(world: World, request: pytest.FixtureRequest) -> Iterator[ParallelTests]:
    yield from parallel_rolls(world, request)


@parallel_test
def test_the_old_engine_is_untouched_until_the_new_one_has_answered(it: Service) -> None:
    it.start()
    (old,) = it.clusters
    engine, began = it.engine(old), time.monotonic()
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait_complete()
    (new,) = it.clusters
    assert (it.most, it.num_ever) == (2, 2)
    assert traffic.failures == []
    # The order is: first token of the new engine, route label of the new engine, end of the old engine.
    served_at, (routed_on, *more), routed_off = it.engine(new).served_at, it.routings(new), it.routings(old)[-1]
    assert more == []
    assert served_at is not None
    assert began < served_at < routed_on.at < routed_off.at
    assert len(it.routings(old)) == 2
    went_by_the_book(it, old, engine)


@parallel_test
def test_two_engines_are_replaced_one_by_one_and_two_serve_at_any_time(it: Service) -> None:
    it.start(replicas=2)
    engines = {name: it.engine(name) for name in it.clusters}
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait_complete()
    assert (it.most, it.num_ever, traffic.fewest) == (3, 4, 2)
    assert traffic.failures == []
    for name, engine in engines.items():
        went_by_the_book(it, name, engine)


@parallel_test
def test_without_surge_one_makes_room_first_and_the_others_serve(it: Service) -> None:
    it.start(replicas=2, rollout={"analysis": ANALYSIS, "maxSurge": 0, "maxUnavailable": 1})
    engines = {name: it.engine(name) for name in it.clusters}
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait_complete()
    assert (it.most, it.num_ever, traffic.fewest) == (2, 4, 1)
    assert traffic.failures == []
    for name, engine in engines.items():
        went_by_the_book(it, name, engine)


def _is_rolled_back(it: Service, image: str, reason: str, says: str, rollout: Mapping[str, object]) -> list[str]:
    """Rolls out `image`, expects a rollback for this reason, and returns the failures that clients noticed."""
    # The first start may take long beside other tests, so no short deadline applies to `start`.
    it.start()
    before, current = it.pods, it.status["currentRevision"]
    with it.traffic() as traffic:
        it.apply(image, rollout={"analysis": ANALYSIS, **rollout})
        it.wait("RolledBack", reason)
        it.wait("Progressing", "RolledBack")
        it.wait_until(lambda: len(it.clusters) == 1, "the failed engine's end")
    assert (it.most, it.pods, traffic.fewest) == (2, before, 1)
    bad, rolled_back = it.status["updateRevision"], it.condition("RolledBack")
    assert it.status["currentRevision"] == current != bad
    assert rolled_back["status"] == "True"
    assert rolled_back["message"].startswith(f"Revision {bad} failed")
    assert says in rolled_back["message"]
    assert it.condition("Progressing")["status"] == "False"
    assert it.condition("Available")["status"] == "True"
    it.wait_until(lambda: reason in it.warnings(), f"an Event {reason}")
    assert "RolledBack" in Kubectl(it.world.kubeconfig)("get", "llm", it.name, "--namespace", it.namespace)
    return traffic.failures


@parallel_test
def test_a_release_that_crashes_at_start_is_rolled_back(it: Service) -> None:
    assert _is_rolled_back(it, CRASHES, "CrashLoop", "no module named attention", {}) == []


@parallel_test
def test_a_release_that_fails_requests_is_rolled_back_and_ends_their_failures(it: Service) -> None:
    # The rollback happens long before the `holdSeconds` of LONG are over.
    failures = _is_rolled_back(it, FAILS, "AnalysisFailed", "requests failed in the new revision", {"analysis": LONG})
    assert failures
    assert {each.partition(" ")[2] for each in failures} == {"answered with an error"}


@parallel_test
def test_a_release_whose_first_tokens_take_long_is_rolled_back(it: Service) -> None:
    analysis = {"analysis": {**ANALYSIS, "holdSeconds": 4}}
    assert _is_rolled_back(it, SLOW, "AnalysisFailed", "99 % of first tokens", analysis) == []


@parallel_test
def test_a_release_that_never_starts_is_rolled_back_after_the_deadline(it: Service) -> None:
    deadline = {"progressDeadlineSeconds": 12}
    assert _is_rolled_back(it, NEVER, "DeadlineExceeded", "rollout.progressDeadlineSeconds", deadline) == []


@parallel_test
def test_no_room_for_another_engine_is_no_failure_of_the_release(it: Service) -> None:
    # A node has 100,000 cores, so each of the two nodes has room for one engine of 60,000 cores.
    large = {"resources": {"requests": {"cpu": "60000"}}}
    it.start(replicas=2, engine=large)
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait("Progressing", "WaitingForCapacity")
        # The deadline is not set earlier, because it runs until the pod is marked unschedulable: if KubeRay created the
        # pod late, the deadline would already be over.
        it.apply(rollout={"analysis": ANALYSIS, "progressDeadlineSeconds": 10})
        it.wait("Progressing", "WaitingForCapacity")
        began = time.monotonic()
        it.wait_until(lambda: time.monotonic() - began > 13, "more than the deadline to pass")
        waiting = it.condition("Progressing")
        assert (waiting["status"], waiting["reason"]) == ("True", "WaitingForCapacity")
        assert "maxSurge 0" in waiting["message"]
        assert it.condition("RolledBack")["status"] == "False"
        # This is the change that the message advises.
        it.apply(rollout={"analysis": ANALYSIS, "maxSurge": 0, "maxUnavailable": 1})
        it.wait_complete()
    assert it.most == 3
    assert traffic.fewest == 1
    assert traffic.failures == []


@parallel_test
def test_a_paused_roll_stands_still_and_scales_and_goes_on(it: Service) -> None:
    it.start()
    (old,) = it.clusters
    current, pods = it.status["currentRevision"], it.pods
    with it.traffic() as traffic:
        it.apply(BETTER, rollout={"analysis": ANALYSIS, "paused": True})
        assert it.wait("Progressing", "Paused")["status"] == "False"
        assert it.wait("Paused", "Paused")["status"] == "True"
        it.apply(replicas=2)
        it.wait_until(lambda: len(it.clusters) == 2 and it.status["availableReplicas"] == 2, "two that serve")
        # Scaling during a pause creates replicas of the current revision, which is no longer in the manifest.
        assert all(current in each for each in it.clusters)
        assert old in it.clusters
        assert pods < it.pods
        it.apply(rollout={"analysis": ANALYSIS, "paused": False})
        it.wait_complete()
    assert it.condition("Paused")["status"] == "False"
    assert not any(current in each for each in it.clusters)
    assert it.most == 3
    assert traffic.failures == []


@parallel_test
def test_a_change_in_the_middle_of_a_roll_is_rolled_out_from_there(it: Service) -> None:
    it.start(rollout={"analysis": LONG})
    (old,) = it.clusters
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait("Progressing", "Analyzing")
        (middle,) = set(it.clusters) - {old}
        began = time.monotonic()
        it.apply(BEST, rollout={"analysis": ANALYSIS})
        it.wait_complete()
    (new,) = it.clusters
    assert new not in (old, middle)
    assert it.most == 2
    assert traffic.failures == []
    # The intermediate revision is deleted first, since it has no completed analysis.
    assert began < it.deletion(middle).at < it.deletion(old).at
    served_at = it.engine(new).served_at
    assert served_at is not None
    assert served_at < it.routings(old)[-1].at


@parallel_test
def test_a_manifest_that_goes_back_keeps_the_engines_that_run(it: Service) -> None:
    it.start(replicas=2, rollout={"analysis": LONG})
    old, pods = it.clusters, it.pods
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait("Progressing", "Analyzing")
        (new,) = set(it.clusters) - set(old)
        engine = it.engine(new)
        it.apply(GOOD)
        it.wait_complete()
    assert (it.clusters, it.pods) == (old, pods)
    assert (it.most, traffic.fewest) == (3, 2)
    assert traffic.failures == []
    assert it.condition("RolledBack")["status"] == "False"
    went_by_the_book(it, new, engine)


@parallel_test
def test_an_engine_that_drains_already_is_taken_back(it: Service) -> None:
    it.start(drainSeconds=90)
    (old,) = it.clusters
    pods, engine = it.pods, it.engine(old)
    it.world.engine(*it.key, old, in_flight=1, finish_s=None)
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait_until(lambda: engine.drains, "the old engine to drain")
        it.apply(GOOD)
        it.wait_complete()
    assert {method for _, method in engine.drains} == {"POST", "DELETE"}
    assert engine.drains[-1][1] == "DELETE"
    assert (it.clusters, it.pods, it.routed) == ([old], pods, {old})
    assert it.most == 2
    assert traffic.failures == []


async def _num_to_fail(traffic: Traffic, engine: Engine) -> int:
    # Runs in the event loop of clients and engines, so that no request ends between the two reads.
    return len(traffic.failures) + engine.num_running


@parallel_test
def test_without_auto_rollback_a_failed_roll_halts_and_the_failed_engine_gets_no_requests(it: Service) -> None:
    it.start(rollout={"analysis": LONG, "autoRollback": False})
    (old,) = it.clusters
    with it.traffic() as traffic:
        it.apply(FAILS)
        halted = it.wait("Progressing", "Halted")
        assert halted["status"] == "False"
        it.wait_until(lambda: it.routed == {old} and len(traffic.addresses) == 1, "requests to reach the old one alone")
        (bad,) = set(it.clusters) - {old}
        began, num_failed = time.monotonic(), it.world.do(_num_to_fail(traffic, it.engine(bad)))
        it.wait_until(lambda: time.monotonic() - began > 3, "more requests")
        assert len(traffic.failures) <= num_failed
        assert sorted(it.clusters) == sorted([old, bad])
        it.apply(BETTER, rollout={"analysis": ANALYSIS, "autoRollback": False})
        it.wait_complete()
        assert len(traffic.failures) <= num_failed
    assert it.most == 2
    assert old not in it.clusters
    assert bad not in it.clusters


@parallel_test
def test_scaling_down_drains_the_least_busy_and_waits_for_their_requests(it: Service) -> None:
    it.start(drainSeconds=90)
    kubectl = Kubectl(it.world.kubeconfig)
    (first,) = it.clusters
    kubectl("scale", "llm", it.name, "--replicas=3", "--namespace", it.namespace)
    it.wait("Progressing", "Complete")
    it.wait_until(lambda: it.status["availableReplicas"] == 3, "three that serve")
    idle, some, most = it.clusters
    for name, number in ((idle, 0), (some, 2), (most, 5)):
        it.world.engine(*it.key, name, in_flight=number, finish_s=None)
    engines = {name: it.engine(name) for name in it.clusters}
    asked = {name: engine.num_asked for name, engine in engines.items()}
    it.wait_until(lambda: all(engines[name].num_asked > asked[name] + 1 for name in asked), "the operator to know")
    kubectl("scale", "llm", it.name, "--replicas=1", "--namespace", it.namespace)
    it.wait_until(lambda: idle not in it.clusters and engines[some].drains, "the idle one to go, the next to drain")
    assert it.clusters == sorted([some, most])
    it.world.engine(*it.key, some, in_flight=0)
    it.wait("Progressing", "Complete")
    it.wait_until(lambda: it.clusters == [most], "the busiest alone")
    assert engines[most].drains == []
    it.wait_until(lambda: it.status["ready"] == "1/1", "the number in the status")
    went_by_the_book(it, idle, engines[idle])
    went_by_the_book(it, some, engines[some])
    assert it.num_ever == 3
    assert first in (idle, some, most)


@parallel_test
def test_no_replicas_suspend_the_service_and_another_number_brings_it_back(it: Service) -> None:
    it.start()
    kubectl = Kubectl(it.world.kubeconfig)
    (old,) = it.clusters
    engine, revision = it.engine(old), it.status["currentRevision"]
    kubectl("scale", "llm", it.name, "--replicas=0", "--namespace", it.namespace)
    assert it.wait("Available", "Suspended")["status"] == "False"
    it.wait_until(lambda: not it.clusters and not it.pods, "nothing to be left")
    it.wait("Progressing", "Complete")
    it.wait_until(lambda: it.status["ready"] == "0/0", "the number in the status")
    went_by_the_book(it, old, engine)
    kubectl("scale", "llm", it.name, "--replicas=1", "--namespace", it.namespace)
    it.wait("Available", "Serving")
    it.wait("Progressing", "Complete")
    assert it.status["currentRevision"] == revision
    (new,) = it.clusters
    assert revision in new
    assert it.num_ever == 2


@parallel_test
def test_settings_of_the_operator_restart_no_engine(it: Service) -> None:
    it.start()
    pods, revision = it.pods, it.status["currentRevision"]
    changes: dict[str, dict[str, Any]] = {
        "drain": {"drainSeconds": 7},
        "recovery": {"recovery": {"hangSeconds": 17, "rebuildSeconds": 900, "restartBudget": 2}},
        "rollout": {"rollout": {"maxSurge": 2, "analysis": {**ANALYSIS, "maxErrorPercent": 5}}},
        "replicas": {"replicas": 2},
    }
    for change in changes.values():
        it.apply(**change)
        it.wait_complete()
    assert pods < it.pods
    assert it.status["currentRevision"] == revision
    assert it.num_ever == 2


@parallel_test
def test_a_failed_revision_is_tried_again_only_after_another_one(it: Service) -> None:
    deadline = {"analysis": ANALYSIS, "progressDeadlineSeconds": 12}
    it.start()
    it.apply(NEVER, rollout=deadline)
    it.wait("Progressing", "RolledBack")
    it.wait_until(lambda: len(it.clusters) == 1, "the failed engine's end")
    (old,) = it.clusters
    # After a change of fields that are not part of the revision, the failed revision is not tried again.
    it.apply(drainSeconds=9, replicas=2, rollout={"analysis": ANALYSIS})
    it.wait("Progressing", "RolledBack")
    it.wait_until(lambda: it.status["availableReplicas"] == 2, "two of the old revision")
    assert it.num_ever == 3
    assert it.condition("RolledBack")["status"] == "True"
    it.apply(BETTER, replicas=1, rollout={"analysis": ANALYSIS})
    it.wait_complete()
    assert it.condition("RolledBack")["status"] == "False"
    before = it.num_ever
    it.apply(NEVER, rollout=deadline)
    it.wait("RolledBack", "DeadlineExceeded")
    assert it.num_ever == before + 1
    assert old not in it.clusters


@parallel_test
def test_a_stream_that_does_not_end_holds_a_roll_for_drain_seconds(it: Service) -> None:
    it.start(drainSeconds=10)
    (old,) = it.clusters
    engine = it.engine(old)
    it.world.engine(*it.key, old, in_flight=1, finish_s=None)
    with it.traffic() as traffic:
        it.apply(BETTER)
        it.wait_complete()
    drained_at = engine.drains[0][0]
    # `drainSeconds` counts from the removal of the route label. The operator may request the drain some seconds later.
    assert it.deletion(old).at - drained_at > 4
    assert traffic.failures == []
    assert it.most == 2
