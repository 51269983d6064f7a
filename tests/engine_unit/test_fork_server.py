"""The fork server of executor `mp`, with real ranks that find no core."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rayloom_engine.config import load_config, parse_config
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rayloom_engine.models.progress import no_progress
from rt_server import wait_until


@pytest.fixture
def core_address() -> Iterator[str]:
    """A port that takes connections and never answers, so that ranks wait there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of two ranks, in the folder of a server."""
    written = tmp_path / "config.json"
    written.write_text(parse_config({"executor": "mp", "pipeline_parallel_size": 2, "device": "cpu"}).model_dump_json())
    (tmp_path / "token").write_text("token")
    return written


@pytest.fixture
def ranks(tmp_path: Path, config: Path, core_address: str) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(load_config(config), tmp_path, core_address)
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


def test_a_rank_that_ends_is_told_with_its_cause_and_its_successor_has_imported(ranks: ProcessRanks) -> None:
    phases: list[str] = []
    ranks.prepare(lambda phase, done, total, unit: phases.append(phase))
    assert phases == ["import"]
    server, (first, second) = _start(ranks, 0, 1)
    assert server.num_threads() == 1, "a fork takes one thread along"
    assert ranks.wait(0.0) == []
    first.kill()
    assert _ended(ranks) == [(0, "SIGKILL")]
    ranks.kill(1)
    assert _ended(ranks) == [(1, "SIGKILL")]
    ranks.kill(1)  # runs no more
    ranks.start(0, 2)
    wait_until(lambda: len(server.children()) == 1, 60.0, lambda: "the rank does not start")
    (successor,) = server.children()
    assert any("libtorch" in each.path for each in successor.memory_maps())
    wait_until(lambda: successor.name() == "rank0", 10.0, successor.name)
    assert not first.is_running() and not second.is_running()


def test_a_fork_server_that_is_stopped_is_ended_when_it_ends_no_rank(
    ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloom_engine.launcher.process_ranks._KILL_SECONDS", 0.2)
    ranks.prepare(no_progress)
    server, started = _start(ranks, 0, 1)
    server.suspend()
    ranks.kill(0)
    assert sorted(_ended(ranks)) == [(rank, "with its fork server: SIGKILL") for rank in (0, 1)]
    assert psutil.wait_procs(started, timeout=10.0)[1] == []


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, config: Path, core_address: str, is_stopped: bool) -> None:
    script = (
        "import sys; from pathlib import Path; from rayloom_engine.config import load_config\n"
        "from rayloom_engine.launcher.process_ranks import ProcessRanks\n"
        "ranks = ProcessRanks(load_config(Path(sys.argv[1])), Path(sys.argv[1]).parent, sys.argv[2])\n"
        "ranks.start(0, 1)\n"
        "while True: ranks.wait(1.0)"
    )
    launcher = psutil.Popen([sys.executable, "-c", script, str(config), core_address])
    try:
        wait_until(lambda: len(launcher.children(recursive=True)) == 2, 60.0, lambda: "no rank starts")
        family = launcher.children(recursive=True)
        if is_stopped:
            family[0].suspend()
    finally:
        launcher.kill()
    launcher.wait()
    assert psutil.wait_procs(family, timeout=10.0)[1] == []


def test_closing_ends_every_rank_and_the_fork_server_though_an_end_was_not_read(ranks: ProcessRanks) -> None:
    server, (first, second) = _start(ranks, 0, 1)
    first.kill()
    wait_until(lambda: server.children() == [second], 10.0, lambda: "the rank is not waited for")
    process = ranks._server[0]  # type: ignore[index]
    ranks.close()
    assert process.returncode == 0
    assert not any(each.is_running() for each in (server, first, second))


def test_ranks_end_with_their_fork_server_and_get_another_one(ranks: ProcessRanks) -> None:
    server, started = _start(ranks, 0, 1)
    server.kill()
    assert sorted(_ended(ranks)) == [(rank, "with its fork server: SIGKILL") for rank in (0, 1)]
    assert psutil.wait_procs(started, timeout=10.0)[1] == []
    assert ranks.wait(0.0) == []
    other, _ = _start(ranks, 1)
    assert other.pid != server.pid


def test_what_a_fork_server_that_cannot_start_says_is_told_of_its_ranks(ranks: ProcessRanks, config: Path) -> None:
    config.write_text("{")
    ranks.start(0, 1)
    assert _ended(ranks) == [(0, "with its fork server: exit code 1")]
