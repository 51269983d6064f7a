"""Records of failed engine replicas in the status: records that are kept, and records that are dropped."""

from dataclasses import replace
from datetime import timedelta

from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.decide.recovery import remembered
from rt_operator import (
    CLOCK,
    conditions,
    crashed,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    settled,
    turn,
)

ONE = make_resolved()
TWO = make_resolved(replicas=2)


def gave_up(times=0):
    return crashed(70, "ranks died") | {"restartCount": times}


def worker(**kwargs):
    return make_pod("worker", is_head=False, **kwargs)


def failing(uid, resolved=ONE):
    return make_serving(resolved, uid=uid, pods=(make_pod(engine=gave_up()),), reading=None)


def test_an_unreadable_status_entry_is_dropped():
    good = turn(ONE, [make_serving(ONE)]).document
    odd = {"groups": [*good["groups"], {"name": "x", "state": "OfALaterVersion"}, {}]}

    assert list(remembered(odd)) == [good["groups"][0]["name"]]


def test_an_unusable_spec_forgets_no_engine_that_waits():
    broken = make_serving(TWO, 0, uid="a", is_headless=True, pods=())
    failed = turn(TWO, [broken, make_serving(TWO, 1)])
    again = turn(
        TWO, [make_serving(TWO, 0, uid="b", is_headless=True, pods=()), make_serving(TWO, 1)], previous=failed.document
    )
    refused = turn(None, [make_serving(TWO, 1)], problems=("spec.model: no",), previous=again.document)
    mended = turn(TWO, [make_serving(TWO, 1)], previous=refused.document)

    kept = {each.name: each for each in refused.status.groups}[broken.name]
    assert (kept.state, kept.restarts, kept.failure.uid) == ("BackOff", 2, "b")
    assert conditions(refused.document)["Available"] == ("True", "Serving")
    assert conditions(refused.document)["Degraded"] == ("True", "GroupBackOff")
    assert mended.plan.waits == (CLOCK + timedelta(seconds=10),)


def test_words_of_a_newer_operator_cost_no_engine_its_record():
    (failed,) = turn(ONE, [failing("a")]).document["groups"]
    newer = failed | {"state": "Dreaming", "reason": "Later", "more": 1}
    newer["failure"] = failed["failure"] | {"reason": "MuchLater", "more": 1}
    found = remembered({"groups": [newer]})[failed["name"]]

    assert (found.restarts, found.failure.uid, found.failure.message) == (1, "a", failed["failure"]["message"])
    again = turn(ONE, [failing("a")], previous={"groups": [newer]})
    assert (again.slots[0].restarts, again.slots[0].has_failed) == (1, True)
    assert again.status.groups[0].failure.uid == "a"


def test_an_unusable_spec_keeps_the_records_of_running_engines():
    failed = turn(ONE, [failing("a")])
    found = turn(None, [failing("a")], problems=("spec.model: no",), previous=failed.document)

    assert found.document["groups"][0]["restarts"] == 1
    assert found.plan.deletions == ()


def test_a_failure_is_kept_when_a_terminating_engine_and_the_failed_one_go_together():
    failed = make_serving(ONE, 2, pods=(make_pod("head2", engine=gave_up()),), reading=None)
    leaver = make_serving(ONE, 1)
    first = turn(ONE, [failed]).document
    (entry,) = first["groups"]
    failure = entry["failure"]
    both = {"groups": [{**entry, "name": leaver.name, "state": "Draining", "failure": None}, entry]}
    rollout = replace(settled(ONE), terminating={leaver.name: ""}, has_served=True)
    stored = {"rollout": RolloutStatus.of(rollout).model_dump(mode="json", by_alias=True, exclude_none=True)}
    written = turn(ONE, [], previous=first | both | stored)
    acted = turn(ONE, [], previous=written.document)

    assert not written.step.is_stored
    for found in (written, acted):
        assert [each.get("failure") for each in found.document["groups"]] == [failure]


def test_a_lost_node_does_not_hide_why_the_next_engine_fails():
    starting = make_serving(ONE, uid="a", reading=make_reading(make_said("starting", None)))
    lost = turn(ONE, [starting], lost_nodes=frozenset({"n1"}))
    first = turn(ONE, [failing("b")], previous=lost.document).document["groups"][0]
    second = turn(ONE, [failing("c")], previous={"groups": [first]}).document["groups"][0]

    assert lost.document["groups"][0]["failure"]["reason"] == "NodeLost"
    assert (first["failure"]["reason"], first["failure"]["uid"], first["restarts"]) == ("EngineFailed", "b", 1)
    assert "ranks died" in first["failure"]["message"]
    assert (second["failure"]["reason"], second["failure"]["uid"], second["restarts"]) == ("EngineFailed", "c", 2)


def test_a_clock_that_was_an_hour_ahead_does_not_delay_an_engine_by_an_hour():
    ahead = CLOCK + timedelta(hours=1)
    failed = turn(ONE, [failing("a")], clock=ahead)
    again = turn(ONE, [failing("b")], previous=failed.document, clock=ahead)
    taken = frozenset({again.status.groups[0].name})
    renamed = turn(ONE, previous=again.document, taken=taken)
    back_off = turn(ONE, previous=renamed.document, taken=taken)

    assert back_off.plan.waits == (CLOCK + timedelta(seconds=10),), "the back-off after the second failure"
    later = turn(ONE, previous=back_off.document, taken=taken, clock=CLOCK + timedelta(seconds=10))
    assert "RayCluster" in [each["kind"] for each in later.plan.wanted]
