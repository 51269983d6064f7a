"""The fork server of executor `mp`, with real ranks that find no core."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from rayloom_engine.config import load_config, parse_config
from rayloom_engine.launcher import fork_server, process_ranks
from rayloom_engine.launcher.fork_messages import Killed, KillRank, RankEnd, Ready, StartRank
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rayloom_engine.models.checkpoint.progress import no_progress
from rt_malformed import sound_folder
from rt_server import wait_until

# A real fork server needs 2 s of CPU time to import torch. This fork server differs only in that it does not import
# torch.
_WITHOUT_TORCH = (
    "-P",
    "-c",
    "from rayloom_engine.launcher.fork_server import main\n"
    "main.__globals__['_preload'] = lambda: None\n"
    "raise SystemExit(main())",
)

# This fork server never ends its imports, as if it was stopped.
_STUCK = (*_WITHOUT_TORCH[:2], _WITHOUT_TORCH[2].replace("lambda: None", "__import__('signal').pause"))
# Waits check only this often: psutil finds children by reading the files of all processes of the machine.
_EVERY_S = 0.1


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers of this test do not import torch, because the test is about the life cycle of processes."""
    monkeypatch.setattr(process_ranks, "_FORK_SERVER", _WITHOUT_TORCH)


@pytest.fixture
def core_address() -> Iterator[str]:
    """A port that accepts connections and never answers, so that ranks wait for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config of two ranks, in the folder of a server."""
    written = tmp_path / "config.json"
    written.write_text(parse_config({"executor": "mp", "pipeline_parallel_size": 2, "device": "cpu"}).model_dump_json())
    (tmp_path / "token").write_text("token")
    return written


@pytest.fixture
def ranks(tmp_path: Path, config: Path, core_address: str) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(load_config(config), tmp_path, core_address)
    yield ranks
    ranks.close()


def _fork_servers() -> list[psutil.Process]:
    name = "rayloom_engine.launcher.fork_server"
    return [each for each in psutil.Process().children() if any(name in part for part in each.cmdline())]


def _start(ranks: ProcessRanks, *numbers: int) -> tuple[psutil.Process, list[psutil.Process]]:
    """The fork server and its ranks, in the order of their starts."""
    for number in numbers:
        ranks.start(number, 1)
    # `_fork_servers` finds a fork server by its command line, which appears only some time after the start.
    wait_until(lambda: len(_fork_servers()) == 1, 60.0, lambda: "there is no fork server", _EVERY_S)
    (server,) = _fork_servers()
    wait_until(lambda: len(server.children()) == len(numbers), 60.0, lambda: "the ranks do not start", _EVERY_S)
    return server, sorted(server.children(), key=lambda each: each.pid)


def _ended(ranks: ProcessRanks) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    wait_until(lambda: bool(found.extend(ranks.wait(0.1)) or found), 60.0, lambda: "no rank ends")
    return found


def test_the_end_of_a_rank_has_its_cause_and_its_successor_has_imported(ranks: ProcessRanks) -> None:
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
    ranks.kill(1)  # the rank has ended
    ranks.start(0, 2)
    wait_until(lambda: len(server.children()) == 1, 60.0, lambda: "the rank does not start", _EVERY_S)
    (successor,) = server.children()
    assert any("libtorch" in each.path for each in successor.memory_maps())
    wait_until(lambda: successor.name() == "rank0", 60.0, successor.name)
    assert not first.is_running() and not second.is_running()


@pytest.mark.usefixtures("without_torch")
def test_a_fork_server_that_is_stopped_is_ended_when_it_ends_no_rank(
    ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_ranks, "_KILL_SECONDS", 0.2)
    ranks.prepare(no_progress)
    server, started = _start(ranks, 0, 1)
    server.suspend()
    ranks.kill(0)
    assert sorted(_ended(ranks)) == [(rank, "with its fork server: SIGKILL") for rank in (0, 1)]
    assert psutil.wait_procs(started, timeout=60.0)[1] == []


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, config: Path, core_address: str, is_stopped: bool) -> None:
    script = (
        "import sys; from pathlib import Path; from rayloom_engine.config import load_config\n"
        "from rayloom_engine.launcher import process_ranks\n"
        f"process_ranks._FORK_SERVER = {_WITHOUT_TORCH!r}\n"
        "ranks = process_ranks.ProcessRanks(load_config(Path(sys.argv[1])), Path(sys.argv[1]).parent, sys.argv[2])\n"
        "ranks.start(0, 1)\n"
        "while True: ranks.wait(1.0)"
    )
    launcher = psutil.Popen([sys.executable, "-c", script, str(config), core_address])
    try:
        wait_until(lambda: len(launcher.children(recursive=True)) == 2, 60.0, lambda: "no rank starts", _EVERY_S)
        family = launcher.children(recursive=True)
        if is_stopped:
            family[0].suspend()
    finally:
        launcher.kill()
    launcher.wait()
    assert psutil.wait_procs(family, timeout=60.0)[1] == []


def test_a_fork_server_that_is_stopped_while_it_imports_is_replaced(
    ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_ranks, "_IMPORT_SECONDS", 0.2)
    monkeypatch.setattr(process_ranks, "_FORK_SERVER", _STUCK)
    ranks.prepare(no_progress)
    assert _fork_servers() == []
    monkeypatch.setattr(process_ranks, "_FORK_SERVER", _WITHOUT_TORCH)
    _start(ranks, 0)


class _Line:
    """The fork server's end of the launcher's socket. An unrelated process takes the place of the fork server."""

    def __init__(self, ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch) -> None:
        near, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(["sleep", "1000"])
        self.now = time.monotonic()
        monkeypatch.setattr(process_ranks, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(ranks, "_start_server", lambda: setattr(ranks, "_server", (self.process, near)))
        self.say(Ready())
        self.ranks = ranks

    def say(self, message: object) -> None:
        self.end.send(msgspec.json.encode(message))

    def look(self, seconds_later: float) -> list[tuple[int, str]]:
        self.now += seconds_later
        return self.ranks.wait(0.0)

    def is_ended(self, within_s: float = 0.2) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.poll() is not None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.end.close()


@pytest.fixture
def line(ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Line]:
    line = _Line(ranks, monkeypatch)
    yield line
    line.close()


def test_each_rank_gets_an_accelerator_of_its_own(
    line: _Line, tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_ranks, "visible_devices", lambda: ["5", "7"])
    line.ranks._config = load_config(config).model_copy(update={"device": "auto"})
    line.ranks.prepare(no_progress)
    line.ranks.start(1, 3)
    order = msgspec.json.decode(line.end.recv(4096), type=StartRank)
    assert order == StartRank(1, 3, "7")
    seen: list[str] = []

    def run(arguments: list[str]) -> int:
        seen.extend([os.environ["CUDA_VISIBLE_DEVICES"], *arguments])
        return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(fork_server, "name_process", lambda name: seen.append(name))
    monkeypatch.setattr(fork_server.rank_process, "main", run)
    assert fork_server._be_rank(order, tmp_path, "here:1", 17) == 0
    expected = f"rank1 7 --run-dir {tmp_path} --core-address here:1 --rank 1 --incarnation 3 --parent 17"
    assert seen == expected.split()


def test_ranks_share_accelerators_if_the_setting_says_so(
    line: _Line, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_ranks, "visible_devices", lambda: ["5", "7"])
    settings = {"device": "auto", "pipeline_parallel_size": 4, "ranks_per_gpu": 2}
    line.ranks._config = load_config(config).model_copy(update=settings)
    line.ranks.prepare(no_progress)
    for rank in range(4):
        line.ranks.start(rank, 1)
    orders = [msgspec.json.decode(line.end.recv(4096), type=StartRank) for _ in range(4)]
    assert [(order.rank, order.device) for order in orders] == [(0, "5"), (1, "5"), (2, "7"), (3, "7")]


def test_a_launcher_that_was_away_reads_the_answer_before_it_judges(line: _Line) -> None:
    line.ranks.prepare(no_progress)
    line.ranks.start(0, 1)
    line.ranks.kill(0)
    line.say(RankEnd(0, -9))
    assert line.look(60.0) == [(0, "SIGKILL")]
    assert line.look(1.0) == []
    assert not line.is_ended()


def test_a_launcher_that_was_away_gives_a_fork_server_that_was_away_too_its_time(line: _Line) -> None:
    line.ranks.prepare(no_progress)
    line.ranks.start(0, 1)
    line.ranks.kill(0)
    assert line.look(60.0) == []
    assert not line.is_ended()
    for _ in range(5):
        line.look(1.0)
    assert line.is_ended(60.0), "5 s of its time have passed"


def test_a_rank_that_takes_long_to_go_is_not_its_fork_servers_fault(line: _Line) -> None:
    line.ranks.prepare(no_progress)
    line.ranks.start(0, 1)
    line.ranks.kill(0)
    line.say(Killed(0))
    assert [line.look(1.0) for _ in range(60)] == [[]] * 60
    assert not line.is_ended()
    line.say(RankEnd(0, -9))
    assert line.look(1.0) == [(0, "SIGKILL")]


@pytest.mark.parametrize("failing", ["fork", "pidfd_open"])
def test_a_rank_that_cannot_be_forked_costs_no_other(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = set(psutil.Process().children())
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiter = "import os, signal; signal.pause()"
    if failing == "pidfd_open":
        monkeypatch.setattr(os, "fork", lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", waiter], {}))

    def fail(*_: object) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, failing, fail)
    with near, far:
        far.send(msgspec.json.encode(StartRank(1, 1, None)))
        far.send(msgspec.json.encode(KillRank(1)))  # rank 1 does not run
        far.shutdown(socket.SHUT_WR)
        assert fork_server.ForkServer(near).run() is None
        said = [msgspec.json.decode(far.recv(4096), type=Ready | RankEnd) for _ in range(2)]
    assert said == [Ready(), RankEnd(1, 1)]
    assert "rank 1 cannot be started: [Errno 11] Resource temporarily unavailable" in capsys.readouterr().err
    assert set(psutil.Process().children()) <= others


@pytest.mark.usefixtures("without_torch")
def test_closing_ends_every_rank_and_the_fork_server_though_an_end_was_not_read(
    ranks: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_ranks, "_CLOSE_SECONDS", 10.0)  # because other processes use the same CPU cores
    server, (first, second) = _start(ranks, 0, 1)
    first.kill()
    wait_until(lambda: server.children() == [second], 60.0, lambda: "the rank is not waited for", _EVERY_S)
    process = ranks._server[0]  # type: ignore[index]
    ranks.close()
    assert process.returncode == 0
    assert not any(each.is_running() for each in (server, first, second))


@pytest.mark.usefixtures("without_torch")
def test_ranks_end_with_their_fork_server_and_get_another_one(ranks: ProcessRanks) -> None:
    server, started = _start(ranks, 0, 1)
    server.kill()
    assert sorted(_ended(ranks)) == [(rank, "with its fork server: SIGKILL") for rank in (0, 1)]
    assert psutil.wait_procs(started, timeout=60.0)[1] == []
    assert ranks.wait(0.0) == []
    other, _ = _start(ranks, 1)
    assert other.pid != server.pid


def test_the_cause_of_a_fork_server_that_cannot_start_is_that_of_its_ranks(ranks: ProcessRanks, config: Path) -> None:
    config.write_text("{")
    ranks.start(0, 1)
    assert _ended(ranks) == [(0, "with its fork server: exit code 1")]


_LOAD_AFTER_PRELOAD = """
import sys, threading
import rayloom_engine.launcher.fork_server as fork_server
from rayloom_engine.config import load_config
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.worker.start import find_model, start_rank
from pathlib import Path
fork_server._preload()
before = set(sys.modules)
assert threading.active_count() == 1
config = load_config(Path(sys.argv[1]))
start_rank(config, *find_model(config, no_progress), 1, no_progress)
print(sorted(name for name in set(sys.modules) - before if name.startswith("rayloom_engine")))
"""


def test_a_rank_imports_no_module_of_the_engine_after_its_fork(tmp_path: Path) -> None:
    model = sound_folder(tmp_path / "model")
    config = tmp_path / "config.json"
    settings = {"model": str(model), "device": "cpu", "num_kv_blocks": 64, "threads": 1}
    config.write_text(parse_config(settings).model_dump_json())
    command = [sys.executable, "-c", _LOAD_AFTER_PRELOAD, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.stdout == "[]\n", ended.stdout + ended.stderr
