"""Status documents of hostile images: lists and texts have length limits, and the time to read a response is linear."""

import json

import pytest

from rayloom_operator.engines.status import MAX_RANKS, engine_status
from rayloom_operator.errors import EngineUnavailable
from rt_poller import GOOD

PHASE = {"name": "load", "seconds": 1.0, "done": 5, "total": 9, "unit": "B", "finished": False}


def said(max_ranks=MAX_RANKS, **parts):
    return engine_status(200, json.dumps(GOOD | parts).encode(), max_ranks)


def refusal(body, **options):
    with pytest.raises(EngineUnavailable) as caught:
        engine_status(200, body if isinstance(body, bytes) else json.dumps(GOOD | body).encode(), **options)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"ranks": [{"node": ""}] * 4097}, "4097 ranks; this engine can have 4096 at most"),
        ({"ranks": [{"node": "n"}] * 10 + [{}]}, "ranks.10.node: Field required"),
        ({"ranks": [{"node": "n" * 254}]}, "ranks.0.node"),
        ({"startup": [PHASE] * 65}, "65 startup"),
        ({"startup": [PHASE | {"done": 1 << 70}]}, "startup.0.done"),
        ({"startup": [PHASE | {"done": -1}]}, "startup.0.done"),
        ({"startup": [PHASE | {"name": "x" * 65}]}, "startup.0.name"),
        ({"requests": {"first_token_seconds": {str(n): 1 for n in range(65)}}}, "65 requests.first_token_seconds"),
        ({"requests": {"first_token_seconds": {"1" * 60_000: 1}}}, "not a number of seconds"),
        ({"requests": {"finished": 1 << 54}}, "requests.finished"),
        ({"requests": {"failed": -1}}, "requests.failed"),
        ({"state": "x" * 100}, "state"),
        ({"version": "v" * 10_000}, "version"),
        ({"version": ["v1"]}, "version of type list"),
    ],
)
def test_a_status_with_impossible_values_is_refused(parts, words):
    assert words in refusal(parts)


@pytest.mark.parametrize(
    "body",
    [b"[" * 60_000, b'{"version": ' + b"[" * 60_000, b'{"version": ' + b"[" * 900 + b"]" * 900 + b"}", b"\xff" * 99],
)
def test_a_document_of_any_depth_is_refused(body):
    refusal(body)


def test_a_status_with_more_ranks_than_the_raycluster_has_is_refused():
    assert len(said(2, ranks=[{"node": "n"}] * 2).ranks) == 2
    assert "3 ranks; this engine can have 2 at most" in refusal({"ranks": [{"node": "n"}] * 3}, max_ranks=2)


def test_a_long_reason_is_cut_and_has_no_control_sequences():
    assert said(reason="x" * 60_000).reason == "x" * 597 + "..."
    assert said(reason="a\x1b[31mb\x1b]0;title\x07c\nd").reason == "abc d"
