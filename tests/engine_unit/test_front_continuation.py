"""An answer tells its client that an engine with different rounding has computed a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rt_front import FrontUnderTest, running_front


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path) as running:
        yield running


def round_all(front: FrontUnderTest) -> None:
    """Waits until each sequence has 3 tokens, and then marks all sequences.

    A gateway marks them in the same way when it moves them to an engine with other rounding.
    """

    def mark() -> None:
        for sequence in front.service.client.unfinished():
            sequence.place.is_rounded = True

    def have_begun() -> bool:
        unfinished = list(front.service.client.unfinished())
        return bool(unfinished) and all(len(sequence.generated_ids) == 3 for sequence in unfinished)

    front.wait_until(have_begun, "tokens of every sequence")
    front.do(mark)
    front.do(front.core.release)


def test_a_whole_answer_has_a_header_and_a_warning(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(front.complete, "Hi", n=2)
        round_all(front)
    response = answer.result(60.0)
    assert response.headers["x-rayloom-continuation"] == "rounding"
    (warning,) = response.json()["warnings"]
    assert "may differ by rounding" in warning


def test_a_stream_that_has_begun_gets_the_warning_once_in_a_chunk(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream("Hi") as stream:
        seen = [next(stream)]
        round_all(front)
        seen += list(stream)
    warned = [event["warnings"] for event in seen if isinstance(event, dict) and "warnings" in event]
    assert len(warned) == 1
    assert "may differ by rounding" in warned[0][0]


def test_an_undisturbed_answer_has_neither(front: FrontUnderTest) -> None:
    response = front.complete("Hi")
    assert "x-rayloom-continuation" not in response.headers
    assert "warnings" not in response.json()
