"""Ranks that share layers, behind the real server: the tokens of one rank, also when a rank is killed on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rt_faults import breakable_server, strike
from rt_server import RunningServer
from rt_streams import Said, disturb, undisturbed

NUM_TOKENS = 640  # a tiny model is quick, and the fault must land in the first half
ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
LAYOUTS = {
    "2 x 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "4 x 1": ("--tensor-parallel-size", "4"),
}


@pytest.fixture(scope="module")
def expected(one_rank: RunningServer) -> list[Said]:
    """The tokens of one rank, undisturbed."""
    return undisturbed(one_rank, NUM_TOKENS)


@pytest.fixture(scope="module", params=LAYOUTS)
def server(
    request: pytest.FixtureRequest, four_layers: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("four")
    extra = (*LAYOUTS[request.param], "--executor", "mp", "--hang-seconds", "4")
    with breakable_server(folder, "--model", four_layers, *ARGUMENTS, *extra) as running:
        yield running
        text = running.log_text()
    assert "Traceback" not in text, text[-4000:]


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
