"""One stream for a fixed time, and the process that keeps a core busy during this time."""

from __future__ import annotations

import socket
import time

import psutil
import pytest

from rayloom_bench.busy_neighbour import busy_neighbour
from rayloom_bench.client import RequestOptions
from rayloom_bench.endpoint import Endpoint, EndpointError
from rayloom_bench.timed_stream import TimedStream, run_timed_stream
from rayloom_bench.workload import Workload
from rt_fake_openai import FakeOpenAI, running

STREAM = Workload(name="W", num_requests=2, concurrency=1, num_own=2, num_output=5)
PROMPTS = ((1, 2), (3, 4))


def run(url: str, seconds: float) -> TimedStream:
    options = RequestOptions(extra_fields={"x": 1})
    return run_timed_stream(Endpoint(base_url=url, model_name="m"), STREAM, PROMPTS, options, seconds)


def test_answers_follow_each_other_until_the_time_is_over() -> None:
    seconds = 0.1
    with running(FakeOpenAI()) as fake:
        found = TimedStream(seconds=seconds)
        while found.num_answers <= 2 and seconds < 60.0:  # on a busy machine, few answers fit into a short time
            seconds *= 2
            fake.bodies.clear()
            start = time.perf_counter()
            found = run(fake.url, seconds)
            assert time.perf_counter() - start >= seconds - 0.01  # timers of the event loop may fire a little early
    assert found.num_answers > 2, "the prompts are sent again"
    assert 5 * found.num_answers <= found.num_tokens <= 5 * (found.num_answers + 1)
    assert found.tok_s == found.num_tokens / seconds
    assert fake.most_active == 1
    assert [body["prompt"] for body in fake.bodies[:3]] == [[1, 2], [3, 4], [1, 2]]
    assert fake.bodies[0]["x"] == 1 and fake.bodies[0]["ignore_eos"] is True


def test_a_server_that_answers_nothing_has_no_tokens_when_the_time_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = run(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1)
    assert (found.num_tokens, found.num_answers, found.tok_s) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("short", "4 output tokens, 5 asked for"),
        ("status", "HTTP 429"),
        ("error event", "an error event"),
        ("not json", "not a chunk"),
    ],
)
def test_a_wrong_answer_is_an_error(fault: str, reason: str) -> None:
    with running(FakeOpenAI(faults={1: fault})) as fake, pytest.raises(EndpointError, match=reason):
        run(fake.url, 10.0)


def test_the_neighbour_computes_until_the_end_of_the_context() -> None:
    with busy_neighbour() as neighbour:
        deadline = time.perf_counter() + 60
        while sum(neighbour.cpu_times()[:2]) < 0.05 and time.perf_counter() < deadline:
            assert neighbour.status() in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP)
        assert sum(neighbour.cpu_times()[:2]) >= 0.05
        assert neighbour.nice() == psutil.Process().nice()
    assert not neighbour.is_running()
