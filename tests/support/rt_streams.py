"""Runs many streams at once, and checks that a fault causes only a pause of these streams.

The rules: Clients do not retry. After the fault, up to MOST_LATE new requests arrive while the first streams run. The
fault happens when every stream has at least 16 of its tokens, and at most three quarters of them. Weights are float32.
A request has failed in each of these cases: an HTTP error, an error event, no [DONE], a missing token, a different
token.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import httpx

from rt_call_streams import ENDLESS_JSON, CallStream, call_body
from rt_faults import slow_steps
from rt_server import RunningServer, Stream, wait_until

NUM_STREAMS = 4
NUM_TOKENS = 64  # steps are slow until a fault happens, so it happens before streams of this length end
LATE_TOKENS = 16
LATE_EVERY_S = 0.3
MOST_LATE = 16  # the most requests that arrive after a fault
PROMPTS = [
    "Once upon a time in a small village",
    "The three laws of thermodynamics are",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "1, 2, 3, 5, 8, 13,",
    "Le petit prince habitait",
    "In the year 2350, humanity",
    "The recipe needs the following ingredients:",
]


def completion_body(index: int, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    """A request with reproducible tokens: greedy for even indices, seeded for odd ones. Half of them are for JSON."""
    form = {"structured_outputs": {"json": ENDLESS_JSON}} if index % 4 >= 2 else {}
    return {"model": "m", "prompt": PROMPTS[index % 8], "max_tokens": max_tokens, **_sampling(index), **form}


def stream_body(index: int, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    """The request of stream `index` of `disturb`. In turn these are two texts, a JSON text, and a tool call."""
    if index % NUM_STREAMS == NUM_STREAMS - 1:
        return call_body(PROMPTS[index % 8], max_tokens) | _sampling(index)
    return completion_body(index, max_tokens)


def _sampling(index: int) -> dict[str, object]:
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    return {"ignore_eos": True, **(seeded if index % 2 else {"temperature": 0.0})}


class HasApi(Protocol):
    api_url: str


def start_streams(server: HasApi, bodies: list[dict[str, object]]) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [CallStream() if "tools" in body else Stream() for body in bodies]
    threads = [
        threading.Thread(target=stream.run, args=(server.api_url, body), daemon=True)
        for stream, body in zip(streams, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    return streams, threads


def _start_together(
    server: RunningServer, bodies: list[dict[str, object]]
) -> tuple[list[Stream], list[threading.Thread]]:
    """Like `start_streams`, but the ranks build the grammars before the streams start.

    Without this, streams with no grammar or a small grammar would begin long before the other streams.
    """
    slow = [body for body in bodies if body.keys() & {"tools", "structured_outputs"}]
    streams, threads = start_streams(server, [{**body, "max_tokens": 1} for body in slow])
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * len(slow)
    return start_streams(server, bodies)


def join_streams(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(180.0)
        assert not thread.is_alive(), "a stream did not end"


class Said(NamedTuple):
    tokens: list[str]
    text: str
    calls: list[tuple[str, str]]  # name and arguments, joined from the deltas


def said(stream: Stream) -> Said:
    return Said(stream.tokens, stream.text, _calls(stream))


def _calls(stream: Stream) -> list[tuple[str, str]]:
    return stream.calls() if isinstance(stream, CallStream) else []


def undisturbed(server: RunningServer, num_tokens: int = NUM_TOKENS) -> list[Said]:
    """The answers of the streams of `disturb` without a fault."""
    streams, threads = start_streams(server, [stream_body(index, num_tokens) for index in range(NUM_STREAMS)])
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [name for stream in streams for name, _ in _calls(stream)] == ["add"], "one stream is inside a tool call"
    return [said(stream) for stream in streams]


@dataclass(frozen=True)
class Disturbance:
    failures: list[str]  # failed requests, in words; empty if clients noticed only a pause
    num_requests: int
    noticed_s: float  # seconds from the fault until the front noticed it
    seconds: float  # seconds from the fault to the next token of a running stream
    before: dict[str, Any]  # /status
    after: dict[str, Any]

    def pids(self, *, after: bool) -> dict[str, int]:
        """Rank -> process id."""
        return {f"rank {rank['rank']}": rank["pid"] for rank in (self.after if after else self.before)["ranks"]}

    def survivors_read_nothing(self) -> bool:
        """True if the ranks that kept their processes have read no byte of weights since the fault."""
        read = {rank["pid"]: rank["weight_bytes_read"] for rank in self.before["ranks"]}
        return all(
            read.get(rank["pid"], rank["weight_bytes_read"]) == rank["weight_bytes_read"] > 0
            for rank in self.after["ranks"]
        )


def disturb(
    server: RunningServer,
    expected: list[Said],
    strike: Callable[[], None],
    strike_at: int = 16,
) -> Disturbance:
    """Calls `strike` by the rules above, when each stream has `strike_at` tokens.

    `server` is a `breakable_server`. `expected` is the result of `undisturbed`. Returns when every request has ended
    and the server serves again, in a new epoch.
    """
    before = server.status()
    with slow_steps(server.log.parent):
        streams, threads = _start_together(server, [stream_body(index) for index in range(NUM_STREAMS)])
        wait_until(
            lambda: all(len(stream.tokens) >= strike_at and _is_inside(stream) for stream in streams),
            60.0,
            lambda: f"{[(len(stream.tokens), stream.failure) for stream in streams]}\n{server.log_text()[-2000:]}",
        )
        struck_at, struck_time = time.monotonic(), time.time()
        strike()
        received = [len(stream.tokens) for stream in streams]
    assert max(received) <= NUM_TOKENS * 3 // 4, f"the fault came too late: {received}"

    late: list[Stream] = []
    late_threads: list[threading.Thread] = []
    while running := [thread for thread in threads if thread.is_alive()]:
        if len(late) < MOST_LATE:
            new, new_threads = start_streams(server, [stream_body(len(late) % NUM_STREAMS, LATE_TOKENS)])
            late += new
            late_threads += new_threads
        running[0].join(LATE_EVERY_S)
        assert time.monotonic() < struck_at + 120.0, server.log_text()[-4000:]
    join_streams(late_threads)
    problems = [_problem(stream, words) for stream, words in zip(streams, expected, strict=True)]
    for index, stream in enumerate(late):
        begin = Said(expected[index % NUM_STREAMS].tokens[:LATE_TOKENS], stream.text, _calls(stream))
        problems.append(_problem(stream, begin))
    wait_until(
        lambda: (status := server.status())["state"] == "serving" and status["epoch"] > before["epoch"],
        60.0,
        lambda: f"{server.status()}\n{server.log_text()[-4000:]}",
    )
    seconds = min(_end_of_pause(stream.times, struck_at) for stream in streams) - struck_at
    failures = [problem for problem in problems if problem]
    after = server.status()
    noticed_s = after["recoveries"][-1]["at"] - struck_time
    return Disturbance(failures, len(problems), noticed_s, seconds, before, after)


def loaded_blocks(server: HasApi) -> float:
    """The number of KV blocks that the server's ranks have loaded from host memory, by its metrics."""
    text = httpx.get(f"{server.api_url}/metrics", timeout=60.0).text
    found = re.search(r"^rayloom:kv_host_loaded_blocks_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def _problem(stream: Stream, expected: Said) -> str:
    if stream.failure is None and said(stream) != expected:
        return f"changed: {said(stream)} instead of {expected}"
    return stream.failure or ""


def _is_inside(stream: Stream) -> bool:
    """True for a text, and for a tool call whose arguments have begun. Calls of `stream_body` never end."""
    return not isinstance(stream, CallStream) or any(stream.arguments)


def _end_of_pause(times: list[float], since: float) -> float:
    """The end of the longest pause after `since`. Tokens that were in transit at the fault arrive before that pause."""
    moments = [since, *(moment for moment in times if moment > since)]
    return max(itertools.pairwise(moments), key=lambda pause: pause[1] - pause[0], default=(since, since))[1]
