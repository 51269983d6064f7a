"""Ranks that share layers, behind the real server: the tokens of one rank, even if a rank is killed during the answer.

The last test of each server stops it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rt_faults import breakable_server, strike
from rt_server import RunningServer, wait_until
from rt_streams import Said, completion_body, disturb, join_streams, start_streams, undisturbed

NUM_TOKENS = 640  # a tiny model is quick, and the fault must land in the first half
ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
LAYOUTS = {
    "2 x 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "4 x 1": ("--tensor-parallel-size", "4"),
}
STOPS = {"2 x 2": [signal.SIGINT], "4 x 1": [signal.SIGTERM, signal.SIGTERM]}
ENDS_S = 60.0  # the time that a process takes to end depends on the machine's load; this only bounds a failure


@pytest.fixture(scope="module")
def expected(one_rank: RunningServer) -> list[Said]:
    """The tokens of one rank, undisturbed."""
    return undisturbed(one_rank, NUM_TOKENS)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(layout: str, four_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("four")
    extra = (*LAYOUTS[layout], "--executor", "mp", "--hang-seconds", "4")
    with breakable_server(folder, "--model", four_layers, *ARGUMENTS, *extra) as running:
        yield running


def test_four_ranks_give_the_tokens_of_one(server: RunningServer, expected: list[Said]) -> None:
    assert len({rank["pid"] for rank in server.status()["ranks"]}) == 4
    assert undisturbed(server, NUM_TOKENS) == expected


@pytest.mark.parametrize(
    ("victim", "fault"),
    # In 4 x 1, rank 0 does not notice of itself that rank 2 is gone. A stuck rank's peers wait in a sum.
    [
        ("rank 0", "killed"),
        ("rank 2", "killed"),
        ("rank 3", "killed"),
        pytest.param("rank 2", "stuck", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_a_rank_costs_a_pause_and_no_request(
    victim: str, fault: str, server: RunningServer, expected: list[Said]
) -> None:
    seen = disturb(server, expected, lambda: strike(server, victim, fault), NUM_TOKENS)
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
