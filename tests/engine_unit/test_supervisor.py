"""The supervisor's decisions and refusals. engine_real/ tests that it restarts and stops real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rayloom_engine.common.process import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    read_failure,
    trial_mark,
    write_failure,
)
from rayloom_engine.common.restarts import backoff_seconds
from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.host_file import FOLDER, HostFile, file_name
from rayloom_engine.supervisor import child as child_module
from rayloom_engine.supervisor.child import Child
from rayloom_engine.supervisor.sockets import bind_sockets, lock_run_dir, make_run_dir
from rayloom_engine.supervisor.supervisor import Supervisor
from rt_server import wait_until


def test_the_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    assert [backoff_seconds(num) for num in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_budget_counts_deaths_of_the_last_ten_minutes() -> None:
    child = Child("core", budget=2)
    assert [child.died(now) for now in (0.0, 100.0, 200.0)] == [True, True, False]
    child = Child("core", budget=2)
    assert [child.died(now) for now in (0.0, 100.0, 601.0, 702.0)] == [True, True, True, True]


def test_a_death_sets_when_to_start_again() -> None:
    child = Child("core", budget=5)
    child.died(100.0)
    assert child.start_at == 100.0
    child.died(101.0)
    assert child.start_at == 101.5


def test_a_taken_port_is_named_with_its_field() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"admin_port: cannot listen on 127.0.0.1:{port}: .*choose another one"):
            bind_sockets(parse_config({"port": 0, "admin_port": port}))


def test_an_admin_port_that_others_can_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="admin_token_file must be set"):
        bind_sockets(parse_config({"port": 0, "admin_port": 0, "admin_host": "0.0.0.0"}))


def test_a_server_without_a_folder_for_temporary_files_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"No such file.*docker run --tmpfs /tmp, or set TMPDIR"):
        make_run_dir()


class Heard:
    """A sleeping child process, and the child's end of the pulse pipe."""

    def __init__(self, code: str = "import time; time.sleep(60)") -> None:
        listening, self._speaking = os.pipe()
        os.set_blocking(listening, False)
        self.child = Child("core", budget=5)
        self.process = subprocess.Popen([sys.executable, "-S", "-c", code])
        self.child.started(self.process, 1000.0, listening)
        self._listening = listening

    def say(self, data: bytes) -> None:
        os.write(self._speaking, data)

    def is_silent(self, now: float, was_away: bool = False) -> bool:
        self.child.listen(now, was_away)
        return self.child.is_silent(now, 10.0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._speaking)
        os.close(self._listening)


@pytest.fixture
def heard() -> Iterator[Heard]:
    child = Heard()
    wait_until(lambda: psutil.Process(child.process.pid).status() == psutil.STATUS_SLEEPING, 60.0, lambda: "not asleep")
    child.process.send_signal(signal.SIGSTOP)  # so that the process computes nothing
    wait_until(lambda: psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED, 60.0, lambda: "not stopped")
    yield child
    child.close()


def test_a_child_that_fell_silent_is_known_after_hang_seconds(heard: Heard) -> None:
    assert not heard.is_silent(1000.0)
    heard.say(b"011")
    assert not heard.is_silent(1001.0)
    assert not heard.is_silent(1011.0)
    assert heard.is_silent(1011.1)
    heard.say(b"1")
    assert not heard.is_silent(1011.2)


def test_a_child_that_was_up_is_started_again_at_once(heard: Heard) -> None:
    heard.say(b"1")
    assert not heard.is_silent(1000.0)
    assert [heard.child.died(1000.0), heard.child.died(1001.0)] == [True, True]
    assert heard.child.start_at == 1001.0


def test_a_death_in_a_trial_is_not_counted(heard: Heard) -> None:
    booked = [heard.child.died(1000.0, is_trial=True) for _ in range(100)]
    assert all(booked) and heard.child.start_at == 1000.0
    assert sum(heard.child.died(1000.0) for _ in range(100)) < 100


def test_a_child_that_is_not_up_has_longer(heard: Heard) -> None:
    heard.say(b"00")
    assert not heard.is_silent(1000.0)
    assert not heard.is_silent(1009.0)
    assert heard.is_silent(1011.0)


def test_a_child_that_is_stopped_before_its_first_sign_is_known_too(heard: Heard) -> None:
    assert not heard.is_silent(1000.0)
    assert not heard.is_silent(1009.0)
    assert heard.is_silent(1011.0)


def test_a_supervisor_that_was_stopped_kills_no_child(heard: Heard) -> None:
    heard.say(b"1")
    assert not heard.is_silent(1000.0)
    assert not heard.is_silent(1060.0, was_away=True)
    assert not heard.is_silent(1069.0)
    assert heard.is_silent(1071.0)


def test_a_child_that_waits_for_a_cpu_is_alive_for_a_while_and_a_stopped_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_module, "_cpu_ticks", lambda pid: "7")  # it gets no CPU time
    waiting = Heard("while True: pass")
    waiting.say(b"1")
    assert not waiting.is_silent(1000.0)
    assert not waiting.is_silent(1020.0)
    assert not waiting.is_silent(1059.0)
    waiting.process.send_signal(signal.SIGSTOP)
    wait_until(
        lambda: psutil.Process(waiting.process.pid).status() == psutil.STATUS_STOPPED, 60.0, lambda: "not stopped"
    )
    assert waiting.is_silent(1069.1)
    waiting.close()


def test_a_child_that_uses_cpu_time_is_alive_without_signals_for_a_while() -> None:
    busy = Heard("while True: pass")
    busy.say(b"1")

    def is_silent_after_work(now: float) -> bool:
        used = sum(psutil.Process(busy.process.pid).cpu_times()[:2])
        wait_until(
            lambda: sum(psutil.Process(busy.process.pid).cpu_times()[:2]) > used + 0.05, 60.0, lambda: "it does nothing"
        )
        return busy.is_silent(now)

    assert [is_silent_after_work(now) for now in (1000.0, 1030.0, 1059.0, 1068.0, 1070.0)] == [*[False] * 4, True]
    busy.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stop_signal_that_arrives_while_python_exits_does_not_change_the_exit_code(number: int) -> None:
    program = f"""
import os
from rayloom_engine.supervisor.stop_signals import collect_stop_signals

class LastObject:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, {number:d})

collect_stop_signals()
last = LastObject()
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


def test_a_supervisor_without_its_lock_file_still_removes_the_files_of_its_ranks() -> None:
    """In a full /dev/shm there may have been no room for the lock."""
    token = secrets.token_hex(16)
    HostFile.open(file_name(token, "rank0"), "", 1000).close()
    config = parse_config({"kv_host_memory_bytes": 1 << 20})
    Supervisor._remove_host_files(SimpleNamespace(_config=config, _host_lock=None, _token=lambda: token))
    assert not list(FOLDER.glob(file_name(token, "*")))


def received_signals(collect: str, is_under_nohup: bool, sent: tuple[str, ...]) -> list[str]:
    """Returns the signals that a new process has received. `collect`: module and name of the function that collects."""
    module, name = collect.split(":")
    program = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN if {is_under_nohup} else signal.SIG_DFL)
from {module} import {name} as collect
received = collect()
for name in {sent}:
    os.kill(os.getpid(), signal.Signals[name])
print(*[signal.Signals(number).name for number in received])
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("is_under_nohup", "sent", "received"),
    [
        (False, ("SIGHUP", "SIGHUP", "SIGTERM"), ["SIGHUP", "SIGTERM"]),
        (True, ("SIGHUP", "SIGHUP", "SIGTERM"), ["SIGTERM"]),
        (False, ("SIGTERM", "SIGHUP"), ["SIGTERM"]),  # the terminal closes during the drain
    ],
)
def test_a_closed_terminal_is_one_stop_signal_except_under_nohup_and_in_a_drain(
    is_under_nohup: bool, sent: tuple[str, ...], received: list[str]
) -> None:
    collect = "rayloom_engine.supervisor.stop_signals:collect_stop_signals"
    assert received_signals(collect, is_under_nohup, sent) == received


@pytest.mark.parametrize(("is_under_nohup", "received"), [(False, ["SIGHUP"]), (True, [])])
def test_a_rank_of_a_job_outlives_the_terminal_because_the_drain_needs_it(
    is_under_nohup: bool, received: list[str]
) -> None:
    collect = "rayloom_engine.worker.job:note_stop_signals"
    assert received_signals(collect, is_under_nohup, ("SIGHUP",)) == received


def test_nobody_else_can_lock_the_run_folder_while_its_server_lives(tmp_path: Path) -> None:
    """systemd removes old files of the folder for temporary files, unless it cannot lock their folder."""
    lock = lock_run_dir(tmp_path)
    assert lock is not None
    other = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(parse_config({"port": 0, "admin_port": 0, "restart_budget": 2}))
    yield made
    for listener in (made._api, made._admin):
        listener.close()
    os.close(made._run_dir_lock or -1)
    made._run_dir.rmdir()


def test_a_process_that_cannot_be_started_is_started_later_within_the_budget(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def spawn(module: str, *_: object) -> None:
        attempts.append(module)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(child_module, "spawn", spawn)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    supervisor._front.start_at = None  # as if it ran
    num_open = len(os.listdir("/proc/self/fd"))

    supervisor._start_due()
    assert supervisor._core.start_at == 100.0
    supervisor._core.is_up = True
    supervisor._start_due()
    supervisor._start_due()
    assert supervisor._exit_code is None
    assert len(attempts) == 2, "the third attempt waits for the back-off"
    assert supervisor._core.start_at == 100.5

    supervisor._core.start_at = 0.0
    supervisor._start_due()
    assert (len(attempts), supervisor._exit_code) == (3, EXIT_GIVEN_UP)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_hung_core_is_killed_though_the_disk_takes_no_mark(tmp_path: Path, heard: Heard) -> None:
    server = SimpleNamespace(
        _config=parse_config({}),
        _listened_at=time.monotonic(),
        _children=[heard.child],
        _core=heard.child,
        _run_dir=tmp_path / "missing",
    )
    heard.child.alive_at = time.monotonic() - 11.0
    Supervisor._kill_silent(server)
    assert heard.process.wait(60.0) == -signal.SIGKILL


@pytest.mark.parametrize("was_up", [False, True])
def test_a_front_that_refuses_the_settings_ends_the_server_unless_it_accepted_them_before(
    supervisor: Supervisor, was_up: bool
) -> None:
    listening, speaking = os.pipe()
    os.set_blocking(listening, False)
    front = supervisor._front
    front.started(SimpleNamespace(poll=lambda: EXIT_CONFIG, pid=os.getpid()), time.monotonic(), listening)
    os.write(speaking, b"01" if was_up else b"00")
    front.listen(time.monotonic(), was_away=False)
    supervisor._reap()
    assert supervisor._exit_code == (None if was_up else EXIT_CONFIG)
    assert (front.start_at is not None) == was_up
    os.close(listening)
    os.close(speaking)


def test_only_the_core_that_ran_a_trial_dies_without_being_counted(supervisor: Supervisor) -> None:
    """The next core may die before it has deleted the mark of the trial, for example because it cannot read a key."""
    trial_mark(supervisor._run_dir).touch()
    exit_codes = []
    for _ in range(4):
        supervisor._core.started(SimpleNamespace(poll=lambda: EXIT_AGAIN, pid=os.getpid()), time.monotonic())
        supervisor._reap()
        exit_codes.append(supervisor._exit_code)
    assert exit_codes == [None, None, None, EXIT_GIVEN_UP], "a trial, and three deaths with a budget of 2"


def test_the_failure_of_a_front_is_forgotten_when_the_front_is_started_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_failure(supervisor._run_dir, "there is no tokenizer.json", by="front")
    monkeypatch.setattr(child_module, "spawn", lambda *_: SimpleNamespace(pid=os.getpid()))
    supervisor._start_front()
    assert read_failure(supervisor._run_dir) == ""
    assert supervisor._front.pulse is not None
    os.close(supervisor._front.pulse)
