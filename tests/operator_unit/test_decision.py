"""A decision is a pure function of the situation, and has no other inputs.

The plan and the conditions of a situation are in test_plan, test_recovery, test_held and test_status.
"""

import asyncio
import copy
from dataclasses import replace
from datetime import timedelta

import pytest

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.decision import decide
from rayloom_operator.decide.inspection import Inspection
from rayloom_operator.decide.status import status
from rayloom_operator.observe.observed import Observed, Verdict
from rayloom_operator.reconcile.gather.gatherer import Gatherer
from rt_operator import (
    CLOCK,
    crashed,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_service,
    make_serving,
    make_situation,
    turn,
)
from rt_world import service, with_world

ONE, TWO, NONE = make_resolved(), make_resolved(replicas=2), make_resolved(replicas=0)
GAVE_UP = make_serving(TWO, 1, pods=(make_pod("head1", engine=crashed(70, "ranks died")),), reading=None)
SILENT = make_serving(ONE, reading=make_reading(make_said(), failing_since=105.0, error="no answer"))
NOT_ALLOWED = Verdict(reason=Reason.NOT_ALLOWED, message="spec.model.source: no")
NO_KUBERAY = "The cluster has no KubeRay."


def recorded():
    """Situations: a start, both reconciles after a failure, a lost node, a rollout, refusals."""
    yield "a first start", turn(ONE).situation
    yield "all serve", turn(TWO, [make_serving(TWO), make_serving(TWO, 1)]).situation
    failed = turn(TWO, [make_serving(TWO), GAVE_UP])
    yield "one gave up", failed.situation
    yield "its failure is written", turn(TWO, [make_serving(TWO), GAVE_UP], previous=failed.document).situation
    yield "one does not answer", turn(ONE, [SILENT]).situation
    lost = {"lost_nodes": frozenset({"n1"}), "taken": frozenset({"chat-00000000-7"})}
    yield "a node is lost", turn(TWO, [make_serving(TWO)], **lost).situation
    serving = turn(ONE, [make_serving(ONE)])
    other = make_resolved(image="rayloom/engine:next")
    yield "a roll begins", turn(other, [make_serving(ONE)], previous=serving.document, old=(ONE,)).situation
    yield "none is asked for", turn(NONE, [make_serving(NONE)]).situation
    yield "no spec", turn(None, [make_serving(ONE)], problems=("spec: no",), previous=serving.document).situation
    held = {"service": make_service(), "accepted": NOT_ALLOWED}
    yield "not allowed", make_situation(observed=Observed(replicas=(make_serving(ONE), make_serving(ONE, 1))), **held)
    yield "no KubeRay", replace(serving.situation, kuberay_problem=NO_KUBERAY)


SITUATIONS = dict(recorded())


@pytest.mark.parametrize("name", SITUATIONS)
def test_equal_situations_give_equal_decisions_and_stay_as_they_are(name):
    situation, before = SITUATIONS[name], copy.deepcopy(SITUATIONS[name])
    first, said = decide(situation), status(situation)

    assert situation == before
    assert (decide(before), status(before)) == (first, said)
    assert decide(situation) == first


def test_a_wait_for_the_next_reconcile_is_never_longer_than_the_regular_one():
    assert {name for name, each in SITUATIONS.items() if decide(each).requeue_after_s > 300} == set()


def test_a_new_failure_is_acted_on_in_the_next_reconcile_and_that_is_soon():
    written, acted = SITUATIONS["one gave up"], SITUATIONS["its failure is written"]
    path = f"/apis/ray.io/v1/namespaces/team/rayclusters/{GAVE_UP.name}"

    assert decide(written).requeue_after_s <= 0.2
    assert decide(written).plan.deletions == ()
    assert decide(acted).plan.deletions == (Deletion(path, GAVE_UP.uid, is_foreground=True),)


def test_objects_of_the_inspection_come_before_those_of_the_service():
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "look", "namespace": "team"}}
    situation = replace(SITUATIONS["all serve"], inspection=Inspection(wanted=(job,), look_again_s=4.5))
    decision = decide(situation)

    assert [each["kind"] for each in decision.plan.wanted][:2] == ["Job", "ServiceAccount"]
    assert decision.requeue_after_s <= 4.5


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({}, 20),  # the reading is 10 s old, and is from an engine that does not serve
        ({"spec_requeue_s": 10.0}, 10),
        ({"mounting_s": 0.0}, 2),
        ({"mounting_s": 60.0}, 10),
        ({"observed": Observed(waits=(CLOCK + timedelta(seconds=7),))}, 7),
        ({"observed": Observed()}, 300),
    ],
)
def test_the_soonest_reason_decides_when_a_service_is_reconciled_next(facts, seconds):
    starting = make_serving(ONE, reading=make_reading(make_said("starting", None)))
    situation = make_situation(**{"observed": Observed(replicas=(starting,)), **facts})

    assert decide(situation).requeue_after_s == seconds


@pytest.mark.parametrize(("mounting_s", "seconds"), [(None, 1800), (1.0, 10)])
def test_objects_are_applied_again_sooner_while_a_pod_may_wait_for_one(mounting_s, seconds):
    assert decide(make_situation(mounting_s=mounting_s)).reapply_after_s == seconds


def test_a_spec_that_is_not_allowed_makes_nothing_and_keeps_engines_reachable():
    decision = decide(SITUATIONS["not allowed"])
    kinds = [each["kind"] for each in decision.plan.wanted]

    assert kinds == ["ServiceAccount", "Service", "PodDisruptionBudget", "NetworkPolicy"]
    assert [each.path.rpartition("/")[2][-2:] for each in decision.plan.deletions if "rayclusters" in each.path] == [
        "-1"
    ]


@pytest.mark.parametrize(
    ("facts", "refusal", "reason"),
    [
        ({}, "", Reason.VALID),
        ({}, "no quota", Reason.APPLY_REFUSED),
        ({"kuberay_problem": NO_KUBERAY}, "", Reason.UNSUPPORTED_KUBERAY),
        ({"kuberay_problem": NO_KUBERAY}, "no quota", Reason.APPLY_REFUSED),
        ({"accepted": NOT_ALLOWED, "kuberay_problem": NO_KUBERAY}, "no quota", Reason.NOT_ALLOWED),
    ],
)
def test_faults_of_the_spec_come_before_refusals_and_those_before_the_cluster(facts, refusal, reason):
    assert status(make_situation(**facts), refusal).conditions[0].reason is reason


def test_without_kuberay_no_replica_is_made_and_the_roll_stays_as_it_was_written():
    situation = SITUATIONS["no KubeRay"]
    said = status(situation)

    assert [each["kind"] for each in decide(situation).plan.wanted] == ["PodDisruptionBudget"]
    assert said.rollout.state() == situation.rollout
    assert [each.type for each in said.conditions if each.status == "True"] == ["ModelReady", "Scheduled", "Available"]


def test_a_gathered_situation_is_decided_alike_twice(monkeypatch):
    gathered, gather = [], Gatherer.gather

    async def recorded_gather(self, key, document):
        situation = await gather(self, key, document)
        gathered.append(situation)
        return situation

    monkeypatch.setattr(Gatherer, "gather", recorded_gather)

    async def story(world):
        world.ask_for(service(replicas=2))
        await world.until(lambda: len(world.kube.named("RayCluster")) == 2)
        await world.rest()
        world.ask_for(service(replicas="many") | {"metadata": service()["metadata"] | {"generation": 2}})
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        await asyncio.sleep(0)

    with_world(story)
    assert len(gathered) > 2
    assert {each.accepted.reason for each in gathered} == {VALID.reason, Reason.INVALID_SPEC}
    for situation in gathered:
        assert decide(situation) == decide(copy.deepcopy(situation))
