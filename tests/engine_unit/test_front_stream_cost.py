"""The front's work for a streamed token.

The test counts Python calls, because times differ from machine to machine.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.messages import Outputs, SequenceOutput
from rt_fake_core import say
from rt_front import FrontUnderTest, running_front

MOST_CALLS = 13  # calls for a token, from the decoded message to the write to the connection
NUM_TOKENS = 32


def calls_of_steps(front: FrontUnderTest, sequence: ClientSequence, token_ids: tuple[int, ...]) -> Counter[str]:
    """Counts calls of the front's functions while it receives one message for each token. Runs in the front's loop."""
    client = front.service.client
    link = client.pool.main
    assert link is not None
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "rayloom_engine" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    for token_id in token_ids:
        output = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=(token_id,), attempt=sequence.place.attempt)
        sys.setprofile(count)
        try:
            client.received(link, Outputs((output,)))
            client._answers._readers._read()  # the callback that `received` has scheduled
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_token_takes_a_bounded_number_of_calls_and_is_written_at_once(tmp_path: Path, endpoint: str) -> None:
    with running_front(tmp_path) as front:
        front.do(lambda: setattr(front.core, "script", say("abcdef")))
        front.do(lambda: setattr(front.core, "hold_after", 3))  # the sink exists after the first list of deltas
        path, prompt = (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
            if endpoint == "chat"
            else ("/v1/completions", {"prompt": "Hi"})
        )
        body = {"model": "tiny", "stream": True, "max_tokens": 100, **prompt}
        with front.http.stream("POST", path, json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            shown = ""
            while not shown.endswith("c"):
                shown += text_of_line(next(lines), endpoint)
            sequence = next(iter(front.do(lambda: list(front.service.client.unfinished()))))
            front.do(lambda: calls_of_steps(front, sequence, (120, 120)))  # then the front knows the kind of text
            calls = front.do(lambda: calls_of_steps(front, sequence, (120,) * NUM_TOKENS))
            while len(shown) < 3 + 2 + NUM_TOKENS:
                shown += text_of_line(next(lines), endpoint)
        assert shown == "abc" + "x" * (2 + NUM_TOKENS)
        step = ("CoreClient.received", "EngineAnswers.outputs", "DueReaders.add", "DueReaders._read")
        each = {name: number for name, number in calls.items() if name not in step}
        assert calls["framed"] == NUM_TOKENS
        assert sum(each.values()) <= MOST_CALLS * NUM_TOKENS, each


def text_of_line(line: str, endpoint: str) -> str:
    """The text in an event of one choice."""
    choice = json.loads(line.removeprefix("data: "))["choices"][0]
    return str((choice["delta"].get("content") or "") if endpoint == "chat" else choice["text"])
