"""What every process of the engine does at its start: logging, and a bond to the life of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EXIT_CONFIG = 78  # the settings or the model cannot be used (sysexits.h EX_CONFIG); a restart would not help
EXIT_GIVEN_UP = 70  # a process kept dying until the restart budget was spent (EX_SOFTWARE)
EXIT_RANK_LOST = 75  # a part of a job (executor external) is gone: start the job again (EX_TEMPFAIL)

PULSE_SECONDS = 0.5

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LAST_SECONDS = 5.0


def set_up_logging(role: str, level: str) -> None:
    """Logs to stderr, one line a record, with the process's role."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s",
        force=True,
    )


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For the import of torch, of which nothing is garbage: it takes a tenth less time so."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def end_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal `how` when the process `parent_pid`, which started it, ends for whatever reason.

    Other signals than SIGKILL give it _LAST_SECONDS to end what it has started.
    """
    _control(_PR_SET_PDEATHSIG, how)
    # The parent may be gone before the call; and other systems have no such call.
    threading.Thread(target=_watch_parent, args=(parent_pid, how), daemon=True, name="parent-watch").start()


def die_with_parent(parent_pid: int) -> None:
    """As `end_with_parent` by SIGKILL, without a thread: for a process that forks. Linux alone does it."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def name_process(name: str) -> None:
    """At most 15 characters that `ps` and `top` show of this process."""
    _control(_PR_SET_NAME, name.encode())


def _control(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _watch_parent(parent_pid: int, how: signal.Signals) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    if how is not signal.SIGKILL:
        os.kill(os.getpid(), how)
        time.sleep(_LAST_SECONDS)
    os._exit(1)


def start_pulse(fd: int | None, is_up: Callable[[], bool]) -> None:
    """A thread of this process shows the supervisor, at the other end of the pipe `fd`, that it is not stopped.

    It says too whether the process `is_up`: until then imports may keep the thread from running, and that is no fault.
    """
    if fd is not None:
        threading.Thread(target=_pulse, args=(fd, is_up), daemon=True, name="pulse").start()


def _pulse(fd: int, is_up: Callable[[], bool]) -> None:
    while True:
        give_sign(fd, is_up())
        time.sleep(PULSE_SECONDS)


def give_sign(fd: int, is_up: bool) -> None:
    """One sign of life, every PULSE_SECONDS: `start_pulse` does it for a process without an event loop."""
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):  # full: the supervisor is stopped; broken: it is gone, which others notice
        os.write(fd, b"1" if is_up else b"0")


def node_name() -> str:
    """The Kubernetes node where the manifest says so, else the host's name."""
    return os.environ.get("RAYLOOM_NODE_NAME") or platform.node()


def trial_mark(run_dir: Path) -> Path:
    """A file that is there while the core computes suspects of earlier deaths: its death then narrows them down."""
    return run_dir / "trial"


def silence_mark(run_dir: Path) -> Path:
    """A file that the supervisor leaves when it kills a core for its silence: no request is to blame for that."""
    return run_dir / "silent"


def thread_cpu_clock() -> Callable[[], float]:
    """A clock of the CPU seconds that the calling thread has used, for any other thread to read.

    Where the system has no such clock it shows the process's CPU time. It stands still once the thread has ended.
    """
    if not hasattr(time, "pthread_getcpuclockid"):  # not on macOS
        return time.process_time
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    last = 0.0

    def read() -> float:
        nonlocal last
        with contextlib.suppress(OSError):  # the thread has ended
            last = time.clock_gettime(clock_id)
        return last

    return read


def write_failure(run_dir: Path, cause: str) -> None:
    """Leaves the sentence that says why the engine cannot go on where the supervisor looks for it."""
    (run_dir / "failure").write_text(cause)


def forget_failure(run_dir: Path) -> None:
    """For an engine that goes on after all: a later end has another cause."""
    (run_dir / "failure").unlink(missing_ok=True)


def read_failure(run_dir: Path) -> str:
    """What `write_failure` left; empty when nothing did."""
    try:
        return (run_dir / "failure").read_text()
    except OSError:
        return ""
