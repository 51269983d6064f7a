"""An answer states how long it waited for an engine: whole answers in a header, streams also in a comment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.operations.service import Waits
from rt_fake_core import FINGERPRINT
from rt_front import FrontUnderTest, running_front

BODY = {"prompt": "Hi", "max_tokens": 20}


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontUnderTest]:
    """A front that, like a gateway, holds requests while its core does not serve."""
    waits = Waits(ping_s=0.02, accept_s=0.02)
    with running_front(tmp_path, waits=waits, rules=PoolRules(is_gateway=True, hold_s=60.0)) as running:
        running.do(lambda: describe(running))
        yield running


def describe(front: FrontUnderTest) -> None:
    """Gives the engine the fingerprint of the gateway's model."""
    front.service.client.pool.model = FINGERPRINT
    assert front.core.model is not None
    front.core.model = msgspec.structs.replace(front.core.model, fingerprint=FINGERPRINT)
    front.core.send_status()


def serve(front: FrontUnderTest, is_serving: bool) -> None:
    front.do(lambda: setattr(front.core, "state", "serving" if is_serving else "recovering"))
    front.do(lambda: setattr(front.core, "lost", "" if is_serving else "rank 0"))
    front.do(front.core.send_status)
    front.wait_until(lambda: front.service.client.is_core_serving == is_serving, "the status has come")


def has_waited(front: FrontUnderTest, seconds: float) -> bool:
    """True if a request has waited this long for an engine."""
    since_s = [sequence.place.waits_since_s for sequence in front.service.client.unfinished()]
    return any(each is not None and time.monotonic() - each >= seconds for each in since_s)


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True, "n": 2}], ids=["sampled", "beam search"])
def test_a_whole_answer_has_the_seconds_in_a_header(front: FrontUnderTest, fields: dict[str, Any]) -> None:
    front.do(lambda: setattr(front.core, "alternatives", lambda ids: [(97, -0.5), (98, -1.0), (99, -2.0), (100, -3.0)]))
    assert "x-rayloom-cold-start" not in front.complete(**BODY).headers
    serve(front, False)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(front.complete, **BODY, **fields)
        # The header has whole milliseconds, so a shorter wait could be a 0.
        front.wait_until(lambda: has_waited(front, 0.002), "the request has waited")
        serve(front, True)
        answer = held.result(60.0)
    assert answer.status_code == 200
    assert 0.002 <= float(answer.headers["x-rayloom-cold-start"]) < 20


def test_a_stream_gets_comments_while_it_waits_and_then_the_whole_time(front: FrontUnderTest) -> None:
    serve(front, False)
    request = {"model": "tiny", "stream": True, **BODY}
    with front.http.stream("POST", "/v1/completions", json=request) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        serve(front, True)
        (comment,) = _comments(lines)
    told_s = float(response.headers["x-rayloom-cold-start"])
    assert 0 < told_s < float(comment.removeprefix(": cold start "))


def _comments(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if line.startswith(":") and line != ": ping"]


def test_a_stream_that_did_not_wait_has_neither(front: FrontUnderTest) -> None:
    answer: httpx.Response = front.complete(**BODY, stream=True)
    assert "x-rayloom-cold-start" not in answer.headers
    assert "cold start" not in answer.text
