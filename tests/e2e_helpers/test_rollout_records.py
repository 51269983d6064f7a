"""Records of a rollout and their picture: e2e/disruptions/rollout_under_load.py and rollout_picture.py."""

from types import SimpleNamespace
from xml.etree import ElementTree

from disruptions.rollout_picture import Picture, Span, picture, svg
from disruptions.rollout_under_load import Failure, RolloutRecord, failures_of
from observers.rollout_timeline import Engine

SERVING = {"state": "serving", "last_token_age_seconds": 0.5}
STARTING = {"state": "starting", "last_token_age_seconds": None}
STREAM = {"index": 0, "num_tokens": 2, "began": 101.0, "ended": 103.0, "tokens": ["a", "b"], "failure": ""}


def make_roll(*engines, failures=(), streams=(), probes=()):
    timeline = SimpleNamespace(
        began_at=100.0,
        engines={engine.name: engine for engine in engines},
        steps=[(50.0, "Complete"), (100.5, "Starting"), (130.0, "Analyzing")],
        seconds=lambda at: at - 100.0,
        of=lambda revision: [engine for engine in engines if engine.revision == revision],
    )
    return RolloutRecord(
        what="a change",
        streams=list(streams),
        probes=list(probes),
        failures=list(failures),
        untrue_times=[],
        timeline=timeline,
        over_at=160.0,
    )


def old_engine(*touches):
    return Engine(name="s-old-0", revision="old", made_at=20.0, routes=[(20.0, True)], touches=list(touches))


def new_engine():
    answers = [(125.0, STARTING), (128.0, SERVING), (129.0, SERVING)]
    return Engine(
        name="s-new-0", revision="new", made_at=101.0, routes=[(102.0, False), (130.0, True)], answers=answers
    )


def test_an_old_engine_may_be_touched_once_the_new_one_has_made_a_token():
    seen = make_roll(old_engine((150.0, "it drains")), new_engine())
    assert seen.early_touches("old", "new") == []


def test_an_old_engine_that_was_touched_before_is_told_with_the_seconds():
    seen = make_roll(old_engine((99.0, "it drains"), (127.0, "its route label is removed")), new_engine())
    assert seen.early_touches("old", "new") == [
        "s-old-0: its route label is removed 1.0 s before the new revision had made a token"
    ]


def test_without_a_token_of_the_new_revision_every_touch_is_early():
    seen = make_roll(old_engine((150.0, "it drains")))
    assert len(seen.early_touches("old", "new")) == 1


def test_streams_and_probes_that_failed_stand_in_the_order_of_their_beginning():
    cut = {**STREAM, "tokens": ["a"], "failure": "the stream ended without [DONE]"}
    refused = {**STREAM, "began": 99.0, "tokens": [], "failure": "HTTP 503"}
    changed = {**STREAM, "began": 102.0, "tokens": ["a", "c"]}
    probes = [(100.0, 100.5, ""), (100.5, 100.6, "HTTP 500")]
    found = failures_of([cut, refused, changed, STREAM], probes, [["a", "b", "x"]])
    assert [(each.began, each.is_cut) for each in found] == [
        (99.0, False),
        (100.5, False),
        (101.0, True),
        (102.0, True),
    ]


def test_requests_of_a_time_are_those_that_began_in_it():
    seen = make_roll(streams=[STREAM, {**STREAM, "began": 112.0}], probes=[(105.0, 105.5, ""), (99.0, 101.0, "")])
    assert seen.began_between(100.0, 110.0) == 2


def test_a_picture_shows_each_engine_from_its_start_to_its_end():
    old = old_engine((152.0, "its RayCluster is deleted"))
    old.routes.append((150.0, False))
    old.gone_at = 155.0
    failure = Failure(began=131.0, ended=131.1, what="HTTP 500", is_cut=False)
    drawn = picture(make_roll(old, new_engine(), failures=[failure], streams=[{**STREAM, "times": [101.5, 102.0]}]))
    assert drawn == Picture(
        title="Seconds from the change: a change",
        begin=-5.0,
        end=60.0,
        steps=[(-50.0, "Complete"), (0.5, "Starting"), (30.0, "Analyzing")],
        lanes=[
            (
                "old engine 0",
                [
                    Span(-80.0, 50.0, "gets requests"),
                    Span(50.0, 52.0, "finishes its requests"),
                    Span(52.0, 55.0, "is deleted"),
                ],
            ),
            (
                "new engine 0",
                [
                    Span(1.0, 28.0, "starts"),
                    Span(28.0, 30.0, "serves, gets no requests"),
                    Span(30.0, 60.0, "gets requests"),
                    Span(60.0, 60.0, "is deleted"),
                ],
            ),
        ],
        first_tokens=[(1.0, 0.5)],
        failures=[31.0],
    )
    shapes = ElementTree.fromstring(svg(drawn))
    crosses = [each for each in shapes if each.tag.endswith("path")]
    assert len(crosses) == 2, "the failed request and the legend"
