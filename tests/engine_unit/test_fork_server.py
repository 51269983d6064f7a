"""The fork server of executor `mp`, with real ranks that find no core."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rt_server import wait_until


@pytest.fixture
def core_address() -> Iterator[str]:
    """A port that takes connections and never answers, so that ranks wait there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def ranks(tmp_path: Path, core_address: str) -> Iterator[ProcessRanks]:
    config = parse_config({"executor": "mp", "pipeline_parallel_size": 2, "device": "cpu"})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "token").write_text("token")
    ranks = ProcessRanks(config, tmp_path, core_address)
    yield ranks
    ranks.close()


def _fork_server() -> psutil.Process:
    return next(each for each in psutil.Process().children() if "rayloom_engine.launcher.fork_server" in each.cmdline())


def _start(ranks: ProcessRanks, *numbers: int) -> tuple[psutil.Process, list[psutil.Process]]:
    """The fork server and its ranks, in the order of their starts."""
    for number in numbers:
        ranks.start(number, 1)
    server = _fork_server()
    wait_until(lambda: len(server.children()) == len(numbers), 60.0, lambda: "the ranks do not start")
    return server, sorted(server.children(), key=lambda each: each.pid)


def _ended(ranks: ProcessRanks) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    wait_until(lambda: bool(found.extend(ranks.wait(0.1)) or found), 10.0, lambda: "no rank ends")
    return found


def test_a_rank_that_ends_is_told_with_its_cause_and_its_successor_imports_nothing(ranks: ProcessRanks) -> None:
    server, (first, second) = _start(ranks, 0, 1)
    assert ranks.wait(0.0) == []
    first.kill()
    assert _ended(ranks) == [(0, "SIGKILL")]
    ranks.kill(1)
    assert _ended(ranks) == [(1, "SIGKILL")]
    ranks.kill(1)  # runs no more
    imported_s = sum(server.cpu_times()[:2])
    ranks.start(0, 2)
    wait_until(lambda: len(server.children()) == 1, 60.0, lambda: "the rank does not start")
    assert sum(server.cpu_times()[:2]) - imported_s < 0.5
    assert sum(server.children()[0].cpu_times()[:2]) < 0.5
    assert not first.is_running() and not second.is_running()


def test_ranks_end_with_their_fork_server_and_get_another_one(ranks: ProcessRanks) -> None:
    server, started = _start(ranks, 0, 1)
    server.kill()
    assert sorted(_ended(ranks)) == [(rank, "with its fork server: SIGKILL") for rank in (0, 1)]
    assert psutil.wait_procs(started, timeout=10.0)[1] == []
    assert ranks.wait(0.0) == []
    other, _ = _start(ranks, 1)
    assert other.pid != server.pid


def test_closing_ends_every_rank_and_the_fork_server_before_it_returns(ranks: ProcessRanks) -> None:
    server, started = _start(ranks, 0, 1)
    ranks.close()
    assert not any(each.is_running() for each in [server, *started])


def test_what_a_fork_server_that_cannot_start_says_is_told_of_its_ranks(ranks: ProcessRanks, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    ranks.start(0, 1)
    assert _ended(ranks) == [(0, "with its fork server: exit code 1")]
