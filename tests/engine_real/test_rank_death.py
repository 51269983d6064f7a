"""Ranks as processes and as Ray actors: the same tokens as one rank, and a killed rank, core or launcher costs a pause.

The rules are those of test_core_death.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rt_server import RunningServer, running_server, wait_until
from rt_streams import NUM_TOKENS, completion_body, join_streams, start_streams

ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024", "--num-kv-blocks", "512")
NUM_STREAMS = 4
HANG_SECONDS = 5


def _tokens_of(server: RunningServer, bodies: list[dict[str, object]]) -> list[list[str]]:
    streams, threads = start_streams(server, bodies)
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * len(streams)
    return [stream.tokens for stream in streams]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What one rank says, undisturbed."""
    with running_server(tmp_path_factory.mktemp("one"), *ARGUMENTS) as server:
        return _tokens_of(server, [completion_body(index) for index in range(NUM_STREAMS)])


@pytest.fixture(scope="module", params=["mp", "ray"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp(request.param)
    extra = ("--executor", request.param, "--pipeline-parallel-size", "2", "--hang-seconds", str(HANG_SECONDS))
    with running_server(folder, *ARGUMENTS, *extra) as running:
        yield running
        text = running.log_text()
    assert "Traceback" not in text, text[-4000:]


def _ranks(server: RunningServer) -> list[dict[str, Any]]:
    return server.status()["ranks"]


def _launcher(server: RunningServer) -> int:
    children = psutil.Process(server.process.pid).children()
    return next(child.pid for child in children if "rayloom_engine.launcher" in child.cmdline())


def test_two_stages_say_what_one_rank_says(server: RunningServer, expected: list[list[str]]) -> None:
    status = server.status()
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in status["ranks"]} | {server.children()["core"].pid}) == 3
    assert _tokens_of(server, [completion_body(index) for index in range(NUM_STREAMS)]) == expected


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "core", "launcher"])
def test_a_kill_costs_a_pause_and_no_request(
    server: RunningServer, expected: list[list[str]], victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.status()
    pids = {f"rank {rank['rank']}": rank["pid"] for rank in before["ranks"]}
    pids |= {"core": server.children()["core"].pid, "launcher": _launcher(server)}
    streams, threads = start_streams(server, [completion_body(index) for index in range(NUM_STREAMS)])
    wait_until(
        lambda: all(len(stream.tokens) >= 16 for stream in streams),
        60.0,
        lambda: f"tokens so far: {[len(s.tokens) for s in streams]}\n{server.log_text()[-2000:]}",
    )
    os.kill(pids[victim], signal.SIGKILL)
    received = [len(stream.tokens) for stream in streams]
    assert max(received) <= NUM_TOKENS // 2, f"the fault came too late: {received}"
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == expected

    wait_until(lambda: server.status()["state"] == "serving", 30.0, lambda: str(server.status()))
    after = server.status()
    assert after["epoch"] > before["epoch"]
    assert after["recoveries"][-1]["seconds"] is not None
    now = {f"rank {rank['rank']}": rank["pid"] for rank in after["ranks"]}
    if victim == "launcher":
        assert set(now.values()).isdisjoint(pids.values()), "ranks live and die with their launcher"
    else:
        kept = [name for name in now if name != victim]
        assert [now[name] for name in kept] == [pids[name] for name in kept], "survivors keep process and weights"
        assert victim == "core" or now[victim] != pids[victim]
    if victim.startswith("rank"):
        assert after["recoveries"][-1]["process"] == victim
    pauses = [later - earlier for stream in streams for earlier, later in itertools.pairwise(stream.times)]
    with capsys.disabled():
        print(f"\n  {before['executor']}: {victim} killed; longest pause of a stream {max(pauses):.2f} s")


def test_a_stopped_rank_is_named_and_replaced(
    server: RunningServer, expected: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = _ranks(server)[1]["pid"]
    streams, threads = start_streams(server, [completion_body(index) for index in range(NUM_STREAMS)])
    wait_until(lambda: all(len(s.tokens) >= 16 for s in streams), 60.0, lambda: server.log_text()[-2000:])
    os.kill(victim, signal.SIGSTOP)
    try:
        join_streams(threads)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == expected
    recovery = server.status()["recoveries"][-1]
    assert recovery["process"] == "rank 1"
    assert recovery["cause"].startswith("rank 1: no sign of life for")
    assert victim not in {rank["pid"] for rank in _ranks(server)}
    pauses = [later - earlier for stream in streams for earlier, later in itertools.pairwise(stream.times)]
    with capsys.disabled():
        print(f"\n  rank 1 stopped, named after {HANG_SECONDS} s; longest pause of a stream {max(pauses):.2f} s")
