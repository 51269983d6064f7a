"""`rayloom-engine serve`: owns the listening sockets, starts front, core and launcher, restarts them with a budget.

No torch, no ray, next to no code: what does little seldom dies. The sockets outlive the front, so while a front is
being restarted new connections wait instead of being refused.

In a job (executor external) it starts rank 0 instead of a launcher, and ends when that, or the core, ends.

SIGTERM: the front drains, then everything ends with 0. SIGINT, or a second signal: everything ends now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.common.process import (
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    EXIT_RANK_LOST,
    read_failure,
    silence_mark,
    trial_mark,
    write_failure,
)
from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.executor_choice import JobPlace, choose_executor, job_place

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 60.0  # a child that says nothing is excused for so long by what it computes
_START_SECONDS = 10.0  # a child that is not up yet may wait so long for a disk, also with a lower hang_seconds
_STOP_SECONDS = 1.2  # after a stop signal children have this long before SIGKILL
# The longest path in it is that of a local Ray: /ray/session_2026-11-24_08-05-50_796193_1234567/sockets/plasma_store
_MAX_RUN_DIR_BYTES = 107 - 70
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Child:
    """One supervised process. `starts` counts from 1."""

    def __init__(self, name: str, budget: int) -> None:
        self.name = name
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at: float | None = 0.0  # by time.monotonic; None while it runs
        self.pulse: int | None = None  # where its signs of life come in
        self.heard_at: float | None = None  # by time.monotonic; None = never judged
        self.is_up = False  # it said so
        self._said_at = 0.0  # when it last gave one, or was started
        self._cpu_ticks = ""
        self._budget = RestartBudget(budget)

    def started(self, process: subprocess.Popen[bytes], now: float, pulse: int | None = None) -> None:
        if self.pulse is not None:
            os.close(self.pulse)
        self.process, self.pulse = process, pulse
        self.heard_at, self._said_at, self.is_up = None if pulse is None else now, now, False
        self.starts += 1
        self.start_at = None

    def listen(self, now: float, was_away: bool) -> None:
        """Takes in its signs of life. `was_away`: nobody has listened for a while, so it may have given some."""
        with contextlib.suppress(BlockingIOError):
            while self.pulse is not None and (data := os.read(self.pulse, 4096)):
                self.heard_at, self._said_at, self.is_up = now, now, data.endswith(b"1")
        if was_away:
            self._said_at = now
        # Also what computes is alive, for a while: a call into a library may keep the thread that speaks from running.
        cpu_ticks = "" if self.process is None else _cpu_ticks(self.process.pid)
        is_busy = cpu_ticks != self._cpu_ticks and now - self._said_at < _BUSY_SECONDS
        if self.heard_at is not None and (was_away or is_busy):
            self.heard_at = now
        self._cpu_ticks = cpu_ticks

    def is_silent(self, now: float, hang_seconds: float) -> bool:
        """Whether it gave no sign for longer than it may."""
        patience = hang_seconds if self.is_up else max(hang_seconds, _START_SECONDS)
        return self.heard_at is not None and now - self.heard_at > patience

    def died(self, now: float, is_trial: bool = False) -> bool:
        """Books a death, but for one that narrows suspects down. False when the restart budget is spent."""
        self.process = None
        wait = 0.0 if is_trial else self._budget.wait_after_death(now)
        # What was up does not die of its start, so there is nothing to wait for; the budget bounds it all the same.
        self.start_at = None if wait is None else now + (0.0 if self.is_up else wait)
        return wait is not None


class Supervisor:
    def __init__(self, config: EngineConfig) -> None:
        self._executor = choose_executor(config, os.environ)
        self._config = config = config.model_copy(update={"executor": self._executor.name})
        self._job = job_place(config, os.environ) if self._executor.name == "external" else None
        self._api, self._admin = bind_sockets(config)
        self._ranks = _bind_rank_socket(config, self._job) if self._executor.has_rank_processes else None
        self._run_dir = _make_run_dir()
        self._started = time.time()
        self._front = Child("front", config.restart_budget)
        self._core = Child("core", config.restart_budget)
        self._children = [self._front, self._core]
        if self._ranks is not None:
            # In a job this process starts rank 0, and whoever started the job has started the others.
            self._launcher = Child("rank 0" if self._job else "launcher", config.restart_budget)
            self._children.append(self._launcher)
        self._ray = Child("ray", config.restart_budget) if _starts_ray(config) else None
        if self._ray is not None:
            self._children.append(self._ray)
        self._signals: deque[int] = deque()
        self._exit_code: int | None = None  # set when stopping has begun
        self._listened_at = time.monotonic()
        self._stop_by = float("inf")  # by time.monotonic; set when draining has begun

    @property
    def api_url(self) -> str:
        return _url(self._api)

    @property
    def admin_url(self) -> str:
        return _url(self._admin)

    def run(self) -> int:
        """Supervises until a signal or a child's failure ends it. Returns the exit code."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self._signals.append(received))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up
        logger.info("executor %s (%s)", self._executor.name, self._executor.reason)
        alive = os.environ.get("RAYLOOM_ALIVE_FILE")
        try:
            if alive:
                Path(alive).write_text(str(os.getpid()))
            self._write_run_dir()
            while self._exit_code is None:
                self._start_due()
                select.select([wake_read], [], [], self._next_wake())
                _drain(wake_read)
                self._kill_silent()
                self._reap()
                self._act_on_signals()
                if time.monotonic() > self._stop_by:
                    logger.warning("the front did not end in time; stopping all")
                    self._exit_code = 0
            return self._exit_code
        finally:
            self._stop_children()
            self._leave_word()
            if alive:
                Path(alive).unlink(missing_ok=True)  # what the ranks' Ray waits for before it ends
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _leave_word(self) -> None:
        """Writes why the engine could not go on to where Kubernetes looks for a container's last words."""
        where, cause = os.environ.get("RAYLOOM_TERMINATION_LOG"), read_failure(self._run_dir)
        if where and self._exit_code in (EXIT_CONFIG, EXIT_GIVEN_UP, EXIT_RANK_LOST):
            with contextlib.suppress(OSError):
                Path(where).write_text(cause or "a process of the engine kept dying; its log says why")

    def _write_run_dir(self) -> None:
        token = self._run_dir / "token"
        token.touch(mode=0o600)
        token.write_text(self._job.token if self._job else secrets.token_hex(32))
        (self._run_dir / "config.json").write_text(self._config.model_dump_json())

    def _start_due(self) -> None:
        now = time.monotonic()
        address = f"unix:{self._run_dir}/core.sock"
        common = ["--run-dir", str(self._run_dir), "--core-address", address, "--parent", str(os.getpid())]
        if self._core.start_at is not None and self._core.start_at <= now:
            rank_fds = [] if self._ranks is None else [self._ranks.fileno()]
            ranks = [part for fd in rank_fds for part in ("--rank-fd", str(fd))]
            _start(self._core, "rayloom_engine.core_server.process", [*common, *ranks], rank_fds)
        if self._front.start_at is not None and self._front.start_at <= now:
            fds = (self._api.fileno(), self._admin.fileno())
            ports = ["--api-fd", str(fds[0]), "--admin-fd", str(fds[1])]
            since = ["--start", str(self._front.starts + 1), "--server-started", str(self._started)]
            _start(self._front, "rayloom_engine.front", [*common, *ports, *since], fds)
        if self._ranks is not None and self._launcher.start_at is not None and self._launcher.start_at <= now:
            address = self._job.address if self._job else f"127.0.0.1:{self._ranks.getsockname()[1]}"
            arguments = ["--run-dir", str(self._run_dir), "--core-address", address, "--parent", str(os.getpid())]
            if self._job:
                rank = ["--rank", "0", "--incarnation", "1"]
                self._launcher.started(_spawn("rayloom_engine.worker.process", [*arguments, *rank]), now)
            else:
                start = ["--start", str(self._launcher.starts + 1)]
                _start(self._launcher, "rayloom_engine.launcher", [*arguments, *start])
        if self._ray is not None and self._ray.start_at is not None and self._ray.start_at <= now:
            arguments = ["--run-dir", str(self._run_dir), "--parent", str(os.getpid())]
            self._ray.started(_spawn("rayloom_engine.launcher.local_ray", arguments), now)

    def _next_wake(self) -> float:
        """Seconds until something is due. One at most: a signal may be lost, and signs of life must be looked at."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        return min(1.0, self._config.hang_seconds / 4, max(0.0, min(due, default=float("inf")) - time.monotonic()))

    def _kill_silent(self) -> None:
        """A child that is stopped, or hangs as a whole, is as good as dead."""
        now, hang_seconds = time.monotonic(), self._config.hang_seconds
        was_away, self._listened_at = now - self._listened_at > hang_seconds / 2, now
        for child in self._children:
            child.listen(now, was_away)
            if child.process is not None and child.is_silent(now, hang_seconds):
                logger.warning("%s shows no sign of life for %g s and is killed", child.name, hang_seconds)
                if child is self._core:
                    silence_mark(self._run_dir).touch()
                child.process.kill()
                child.heard_at = None  # said and done once

    def _reap(self) -> None:
        for child in reversed(self._children):
            code = child.process.poll() if child.process is not None else None
            if code is None:
                continue
            if child is self._front and self._signals:
                # Drained; or a job was told to end because a rank died, and the core has just seen that as well.
                if code != 0:  # the requests have died with it, and another one would only take new ones
                    logger.warning("%s died (%s) while it drained", child.name, _cause(code))
                self._exit_code = EXIT_RANK_LOST if self._job and read_failure(self._run_dir) else 0
            elif self._job and child is not self._front and code != EXIT_CONFIG:
                sentence = f"{child.name} ended ({_cause(code)}), and the job with it; start the job again"
                logger.error("%s", sentence)
                if not read_failure(self._run_dir):  # the core may have said it better
                    write_failure(self._run_dir, sentence)
                self._exit_code = EXIT_RANK_LOST
            elif code in (EXIT_CONFIG, EXIT_GIVEN_UP):
                logger.error("%s cannot go on; see its message above", child.name)
                self._exit_code = code
            elif child.died(time.monotonic(), child is self._core and self._was_trial()):
                logger.warning("%s died (%s), restarting", child.name, _cause(code))
            else:
                logger.error(
                    "%s died (%s); restart budget of %d spent", child.name, _cause(code), self._config.restart_budget
                )
                self._exit_code = EXIT_GIVEN_UP

    def _was_trial(self) -> bool:
        """Whether the core that has died leaves fewer suspects by its death."""
        return trial_mark(self._run_dir).exists() and not silence_mark(self._run_dir).exists()

    def _act_on_signals(self) -> None:
        if not self._signals or self._exit_code is not None:
            return
        if signal.SIGINT in self._signals or len(self._signals) > 1 or self._front.process is None:
            self._exit_code = 0
        elif self._stop_by == float("inf"):
            logger.info("SIGTERM: draining for at most %.0f s", self._config.drain_seconds)
            self._stop_by = time.monotonic() + self._config.drain_seconds + _STOP_SECONDS
            self._front.process.send_signal(signal.SIGTERM)

    def _stop_children(self) -> None:
        # Core and rank have nothing to save; the front closes its connections properly, others end what they started.
        how = {"front": signal.SIGINT, "launcher": signal.SIGTERM, "ray": signal.SIGTERM}
        processes = []
        for child in self._children:
            if child.process is not None:
                processes.append(child.process)
                if child.process.poll() is None:
                    child.process.send_signal(how.get(child.name, signal.SIGKILL))
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def bind_sockets(config: EngineConfig) -> tuple[socket.socket, socket.socket]:
    """API and admin socket, listening. Raises ConfigError when a port is taken or the admin port is unprotected."""
    if config.admin_host not in _LOOPBACK and config.admin_token_file is None:
        raise ConfigError(
            f"admin_host: {config.admin_host!r} can be reached from outside, so admin_token_file must be set; "
            "or use 127.0.0.1"
        )
    api = _listen(config.host, config.port, "port")
    try:
        return api, _listen(config.admin_host, config.admin_port, "admin_port")
    except ConfigError:
        api.close()
        raise


def _bind_rank_socket(config: EngineConfig, job: JobPlace | None) -> socket.socket:
    """Where ranks reach the core. From other machines only when they are on other machines.

    It is bound here so that it outlives the core: ranks that dial while a core is being started again just wait.
    """
    if job is not None:
        return _listen("127.0.0.1" if job.is_on_one_host else "0.0.0.0", job.port, "rank_port")
    is_cluster = config.executor == "ray" and not _starts_ray(config)
    return _listen("0.0.0.0" if is_cluster else "127.0.0.1", config.rank_port, "rank_port")


def _starts_ray(config: EngineConfig) -> bool:
    """Whether Ray is to be started on this machine, because no cluster is named."""
    return config.executor == "ray" and not (config.ray_address or os.environ.get("RAY_ADDRESS"))


def _make_run_dir() -> Path:
    """A folder of our own whose sockets' paths are short enough: a Unix socket's name holds 107 bytes."""
    folder = tempfile.mkdtemp(prefix="rayloom-")
    if len(os.fsencode(folder)) > _MAX_RUN_DIR_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="rayloom-", dir="/tmp")
    return Path(folder)


def _listen(host: str, port: int, field: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error.strerror}; choose another one") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _cpu_ticks(pid: int) -> str:
    """What it has computed so far, to compare with a later time; the same for ever where there is no /proc."""
    try:
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    except OSError:
        return ""


def _start(child: Child, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
    pulse, pulse_end = os.pipe()
    os.set_blocking(pulse, False)
    process = _spawn(module, [*arguments, "--pulse-fd", str(pulse_end)], [*fds, pulse_end])
    os.close(pulse_end)
    child.started(process, time.monotonic(), pulse)


def _spawn(module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in a terminal reaches the supervisor alone, which ends the others in order.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_ignore_sigint,
    )


def _ignore_sigint() -> None:
    """Runs in the child: a stop that comes while it still imports must not end in a KeyboardInterrupt's trace.

    The front sets a handler of its own once it can stop in order.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _drain(wake: socket.socket) -> None:
    wake.setblocking(False)
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        return


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
