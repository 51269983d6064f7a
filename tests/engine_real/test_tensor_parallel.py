"""Ranks that share layers, in a real server, give the tokens of one rank, even if a rank is killed during the answer.

The last test of each server stops it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rt_faults import aim, breakable_server
from rt_server import RunningServer, wait_until
from rt_streams import NUM_TOKENS, Said, completion_body, disturb, join_streams, start_streams

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
LAYOUTS = {
    "2 x 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "4 x 1": ("--tensor-parallel-size", "4"),
}
# The ranks that are killed cover each stage and each shard. In 4 x 1, rank 0 does not itself notice the loss of rank 2.
VICTIMS = {"2 x 2": ["rank 0", "rank 3"], "4 x 1": ["rank 2"]}
STOPS = {"2 x 2": [signal.SIGINT], "4 x 1": [signal.SIGTERM, signal.SIGTERM]}
ENDS_S = 60.0  # limit of a failing test; the load decides how long the end of a process takes


@pytest.fixture(scope="module")
def expected(said_by_one_rank: Callable[[int], list[Said]]) -> list[Said]:
    return said_by_one_rank(NUM_TOKENS)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(layout: str, three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("four")
    extra = (*LAYOUTS[layout], "--executor", "mp", "--hang-seconds", "4")
    with breakable_server(folder, "--model", three_layers, *ARGUMENTS, *extra) as running:
        yield running


def test_four_ranks_give_the_tokens_of_one_and_a_killed_one_costs_a_pause_and_no_request(
    server: RunningServer, layout: str, expected: list[Said]
) -> None:
    assert len({rank["pid"] for rank in server.status()["ranks"]}) == 4
    for victim in VICTIMS[layout]:
        check_fault(server, expected, victim, "killed")


@pytest.mark.slow
def test_a_stuck_rank_whose_peers_wait_in_a_sum_costs_a_pause_and_no_request(
    server: RunningServer, expected: list[Said]
) -> None:
    check_fault(server, expected, "rank 2", "stuck")


def check_fault(server: RunningServer, expected: list[Said], victim: str, fault: str) -> None:
    seen = disturb(server, expected, aim(server, victim, fault))
    assert seen.failures == []
    before, after = seen.pids(after=False), seen.pids(after=True)
    assert [rank for rank in after if after[rank] != before[rank]] == [victim]
    assert seen.survivors_read_nothing()
    assert len(seen.after["recoveries"]) == len(seen.before["recoveries"]) + 1
    assert seen.after["recoveries"][-1]["process"] == victim


def test_the_log_holds_no_trace(server: RunningServer) -> None:
    assert "Traceback" not in server.log_text()


def test_a_hard_stop_ends_everything_and_no_stream_is_finished_first(
    server: RunningServer, layout: str, measured: Callable[[str], None]
) -> None:
    *drains, stop = STOPS[layout]
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    [stream], threads = start_streams(server, [completion_body(0, 900)])
    wait_until(lambda: bool(stream.tokens), ENDS_S, lambda: f"no token; {stream.failure}")
    for number in drains:
        server.process.send_signal(number)
        wait_until(lambda: "draining for at most" in server.log_text(), ENDS_S, server.log_text)
    started = time.monotonic()
    server.process.send_signal(stop)
    assert server.process.wait(ENDS_S) == 0
    assert psutil.wait_procs(family, timeout=ENDS_S)[1] == []
    measured(f"all processes ended {time.monotonic() - started:.2f} s after the signal")
    join_streams(threads)
    assert stream.failure is not None, f"the stream was finished, with {len(stream.tokens)} tokens"
