"""`rayloom-engine serve`: owns the listening sockets; starts the API server process, the EngineCore and the launcher.

A child that dies is restarted, within a restart budget. The supervisor itself seldom dies, because it does little and
imports neither torch nor Ray. The sockets outlive the API server process ("front"): while the front restarts, new
connections wait and are not refused.

In a job (executor external) the supervisor starts rank 0 instead of a launcher, and exits when rank 0 or the EngineCore
("core") ends.

After SIGTERM or SIGHUP, the front drains, then all processes end, and the exit code is 0. After SIGINT, or a second
signal, all processes end at once. A SIGHUP during a drain has no effect.
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
import time
from collections import deque
from pathlib import Path

from rayloom_engine.common.process import (
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    EXIT_RANK_LOST,
    forget_failure,
    read_failure,
    silence_mark,
    trial_mark,
    write_failure,
)
from rayloom_engine.config import EngineConfig
from rayloom_engine.executor_choice import choose_executor, job_place
from rayloom_engine.kv.host_file import SUPERVISOR, HostFile, file_name, remove_files
from rayloom_engine.supervisor.child import Child, cause_of
from rayloom_engine.supervisor.prepared import PreparedProcess
from rayloom_engine.supervisor.sockets import (
    bind_front_socket,
    bind_rank_socket,
    bind_sockets,
    lock_run_dir,
    make_run_dir,
    starts_ray,
    url_of,
)
from rayloom_engine.supervisor.spawn import spawn
from rayloom_engine.supervisor.stop_signals import collect_stop_signals

logger = logging.getLogger(__name__)

_STOP_SECONDS = 1.2  # seconds between the stop signal to a child and its SIGKILL


class Supervisor:
    def __init__(self, config: EngineConfig, core: PreparedProcess | None = None) -> None:
        """`core`: a core process that has begun its imports; the first start of the core uses this process."""
        self._executor = choose_executor(config, os.environ)
        self._config = config = config.model_copy(update={"executor": self._executor.name})
        self._job = job_place(config, os.environ) if self._executor.name == "external" else None
        self._api, self._admin = bind_sockets(config)
        self._gateways = bind_front_socket(config)
        self._ranks = bind_rank_socket(config, self._job) if self._executor.has_rank_processes else None
        self._run_dir = make_run_dir()
        self._run_dir_lock = lock_run_dir(self._run_dir)
        self._started = time.time()
        self._front = Child("front", config.restart_budget)
        self._core = Child("core", config.restart_budget, core)
        self._children = [self._front, self._core]
        self._launcher: Child | None = None
        if self._ranks is not None:
            # In a job, the supervisor starts rank 0, and the job's own launcher (such as torchrun) starts the other
            # ranks.
            self._launcher = Child("rank 0" if self._job else "launcher", config.restart_budget)
            self._children.append(self._launcher)
        self._ray = Child("ray", config.restart_budget) if starts_ray(config) else None
        if self._ray is not None:
            self._children.append(self._ray)
        self._signals: deque[int] = deque()
        self._exit_code: int | None = None  # set once the supervisor is about to stop
        self._listened_at = time.monotonic()
        self._host_lock: HostFile | None = None
        self._stop_by = float("inf")  # latest end of a drain, by time.monotonic; infinite until the drain begins

    @property
    def api_url(self) -> str:
        return url_of(self._api)

    @property
    def admin_url(self) -> str:
        return url_of(self._admin)

    def run(self) -> int:
        """Supervises until a signal, or a child that cannot continue, ends the server. Returns the exit code."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        self._signals = collect_stop_signals()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # SIGCHLD writes to the wake-up socket only if it has a handler
        poller = select.poll()
        poller.register(wake_read, select.POLLIN)
        logger.info("executor %s (%s)", self._executor.name, self._executor.reason)
        if self._gateways is not None:
            logger.info("gateways may connect to %s port %d", *self._gateways.getsockname()[:2])
        alive = os.environ.get("RAYLOOM_ALIVE_FILE")
        try:
            if alive:
                Path(alive).write_text(str(os.getpid()))
            self._write_run_dir()
            self._lock_host_files()
            while self._exit_code is None:
                self._start_due()
                poller.poll(1000 * self._next_wake())
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
            self._write_termination_message()
            if alive:
                Path(alive).unlink(missing_ok=True)  # Ray's container in this pod exits once this file is gone
            self._remove_host_files()
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _lock_host_files(self) -> None:
        """Locks a file as long as this engine lives. Other engines remove the copies of engines without this lock."""
        if self._config.kv_host_memory_bytes:
            with contextlib.suppress(OSError):  # without room for this file, the ranks report what to change
                self._host_lock = HostFile.open(file_name(self._token(), SUPERVISOR), "", 0)

    def _remove_host_files(self) -> None:
        """Removes the copies of KV blocks that processes of this engine have left in this machine's memory."""
        if self._config.kv_host_memory_bytes:
            with contextlib.suppress(OSError):  # it may have ended before it made its token
                remove_files(self._token())

    def _token(self) -> str:
        return (self._run_dir / "token").read_text().strip()

    def _write_termination_message(self) -> None:
        """Writes the cause of a failure to the container's termination message, so that Kubernetes shows the cause."""
        where = os.environ.get("RAYLOOM_TERMINATION_LOG")
        cause = read_failure(self._run_dir)
        if where and self._exit_code in (EXIT_CONFIG, EXIT_GIVEN_UP, EXIT_RANK_LOST):
            with contextlib.suppress(OSError):
                Path(where).write_text(cause or "a process of the engine kept dying; its log says why")

    def _write_run_dir(self) -> None:
        token = self._run_dir / "token"
        token.touch(mode=0o600)
        token.write_text(self._job.token if self._job else secrets.token_hex(32))
        (self._run_dir / "config.json").write_text(self._config.model_dump_json())

    # --- start ---

    def _start_due(self) -> None:
        for child in (self._core, self._front, self._launcher, self._ray):
            if child is None or not child.is_due(time.monotonic()):
                continue
            try:
                self._start(child)
            except OSError as error:  # too little memory, or no free process or file, perhaps only for a while
                self._plan_restart(child, child.could_not_start(time.monotonic()), f"cannot be started: {error}")

    def _start(self, child: Child) -> None:
        if child is self._core:
            self._start_core()
        elif child is self._front:
            self._start_front()
        elif child is self._launcher:
            self._start_launcher(child)
        else:
            child.started(spawn("rayloom_engine.launcher.local_ray", self._common_arguments()), time.monotonic())

    def _start_core(self) -> None:
        flags = {"--rank-fd": self._ranks, "--front-fd": self._gateways}
        fds = {flag: listener.fileno() for flag, listener in flags.items() if listener is not None}
        listeners = [part for flag, fd in fds.items() for part in (flag, str(fd))]
        arguments = [*self._common_arguments(), "--core-address", self._core_address(), *listeners]
        self._core.start("rayloom_engine.core_server.process", arguments, list(fds.values()))

    def _start_front(self) -> None:
        forget_failure(self._run_dir, by="front")
        fds = (self._api.fileno(), self._admin.fileno())
        ports = ["--api-fd", str(fds[0]), "--admin-fd", str(fds[1])]
        since = ["--start", str(self._front.starts + 1), "--server-started", str(self._started)]
        arguments = [*self._common_arguments(), "--core-address", self._core_address(), *ports, *since]
        self._front.start("rayloom_engine.front", arguments, fds)

    def _start_launcher(self, launcher: Child) -> None:
        """Starts the launcher, or rank 0 in a job."""
        if self._job is not None:
            arguments = [*self._common_arguments(), "--core-address", self._job.address]
            rank = ["--rank", "0", "--incarnation", "1"]
            launcher.started(spawn("rayloom_engine.worker.process", [*arguments, *rank]), time.monotonic())
            return
        assert self._ranks is not None
        address = f"127.0.0.1:{self._ranks.getsockname()[1]}"
        start = ["--start", str(launcher.starts + 1)]
        launcher.start("rayloom_engine.launcher", [*self._common_arguments(), "--core-address", address, *start])

    def _common_arguments(self) -> list[str]:
        return ["--run-dir", str(self._run_dir), "--parent", str(os.getpid())]

    def _core_address(self) -> str:
        return f"unix:{self._run_dir}/core.sock"

    # --- watch ---

    def _next_wake(self) -> float:
        """Returns the seconds until a child must be started or checked for signs of life.

        The result is at most 1, so that a lost SIGCHLD or stop signal only causes a short delay.
        """
        due = [child.start_at for child in self._children if child.start_at is not None]
        return min(1.0, self._config.hang_seconds / 4, max(0.0, min(due, default=float("inf")) - time.monotonic()))

    def _kill_silent(self) -> None:
        """Kills children that show no sign of life, because they are stopped or hang. `_reap` then restarts them."""
        now = time.monotonic()
        hang_seconds = self._config.hang_seconds
        was_away = now - self._listened_at > hang_seconds / 2
        self._listened_at = now
        for child in self._children:
            child.listen(now, was_away)
            if child.process is not None and child.is_silent(now, hang_seconds):
                logger.warning("%s shows no sign of life for %g s and is killed", child.name, hang_seconds)
                if child is self._core:
                    with contextlib.suppress(OSError):  # a full disk must not end the server
                        silence_mark(self._run_dir).touch()
                child.process.kill()
                child.alive_at = None  # no longer watched, so that the child is killed and logged only once

    def _reap(self) -> None:
        """Plans the restart of dead children, or sets the exit code if the server must end."""
        for child in reversed(self._children):
            code = child.process.poll() if child.process is not None else None
            if code is None:
                continue
            if child is self._front and self._signals:
                self._end_after_drain(code)
            elif self._job and child is not self._front and code != EXIT_CONFIG:
                self._end_job(child, code)
            elif code == EXIT_GIVEN_UP or (code == EXIT_CONFIG and not child.was_up):
                # A child that was up before has accepted the settings. A file that it cannot read now, such as a key
                # that is being renewed, may be there at the next start.
                logger.error("%s cannot continue; see its message above", child.name)
                self._exit_code = code
            else:
                may_restart = child.died(time.monotonic(), child is self._core and self._take_trial())
                self._plan_restart(child, may_restart, f"died ({cause_of(code)})")

    def _plan_restart(self, child: Child, may_restart: bool, event: str) -> None:
        """Logs the planned restart of a child, or sets the exit code if the child's restart budget is spent."""
        if may_restart:
            logger.warning("%s %s, restarting", child.name, event)
            return
        logger.error("%s %s; restart budget of %d exhausted", child.name, event, self._config.restart_budget)
        self._exit_code = EXIT_GIVEN_UP

    def _end_after_drain(self, code: int) -> None:
        """Stops the server, because the front has ended during a drain.

        If the front has crashed, its unfinished requests are lost.

        In a job, SIGTERM may also mean that a rank has died. The EngineCore has then written the failure.
        """
        if code != 0:
            logger.warning("front died (%s) while it drained", cause_of(code))
        self._exit_code = EXIT_RANK_LOST if self._job and read_failure(self._run_dir) else 0

    def _end_job(self, child: Child, code: int) -> None:
        sentence = f"{child.name} ended ({cause_of(code)}), and the job with it; start the job again"
        logger.error("%s", sentence)
        if not read_failure(self._run_dir):  # the EngineCore may already have written the cause
            write_failure(self._run_dir, sentence)
        self._exit_code = EXIT_RANK_LOST

    def _take_trial(self) -> bool:
        """True if the EngineCore crashed in a trial of suspects (core/suspicion.py): fewer suspects then remain.

        Deletes the mark of the trial: the next core may die before it deletes the mark, and this death must count.
        """
        was_trial = trial_mark(self._run_dir).exists() and not silence_mark(self._run_dir).exists()
        with contextlib.suppress(OSError):  # there is none, or the disk has become read-only
            trial_mark(self._run_dir).unlink()
        return was_trial

    # --- stop ---

    def _act_on_signals(self) -> None:
        if not self._signals or self._exit_code is not None:
            return
        if signal.SIGINT in self._signals or len(self._signals) > 1 or self._front.process is None:
            self._exit_code = 0
        elif self._stop_by == float("inf"):
            name = signal.Signals(self._signals[0]).name
            logger.info("%s: draining for at most %.0f s", name, self._config.drain_seconds)
            self._stop_by = time.monotonic() + self._config.drain_seconds + _STOP_SECONDS
            self._front.process.send_signal(signal.SIGTERM)

    def _stop_children(self) -> None:
        # The front must close its connections, and launcher and Ray must end their children. Core and rank 0 have
        # nothing to save, so they get SIGKILL.
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


def _drain(wake: socket.socket) -> None:
    wake.setblocking(False)
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        return
