"""Code for every process of the engine: logging, exit with the parent, signs of life, files of the run folder."""

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
from typing import Literal

EXIT_AGAIN = 1  # a restart may help
EXIT_CONFIG = 78  # the settings or the model cannot be used (sysexits.h EX_CONFIG); a restart would not help
EXIT_GIVEN_UP = 70  # a process kept dying until the restart budget was spent (EX_SOFTWARE)
EXIT_RANK_LOST = 75  # a process of a job (executor external) is lost: the job must be started again (EX_TEMPFAIL)

PULSE_SECONDS = 0.5

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_LAST_SECONDS = 5.0
_FAILURE_FILES = {"core": "failure", "front": "front-failure"}
_YOUNG_OBJECTS = 20_000  # number of new lists, tuples and objects after which a collection starts: a few megabytes


def set_up_logging(role: str, level: str) -> None:
    """Sets up logging to stderr. Each line contains the process's role."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s",
        force=True,
    )


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector in a `with` block. The import of torch then takes a tenth less time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_garbage_seldom() -> None:
    """Exempts the present objects from garbage collection, and makes collections of later ones rare.

    By default, Python starts a collection after 700 new objects, and a step of many streams allocates more. These
    objects form no cycles and are freed at once. So a collection would find nothing and delay all streams.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)


def return_free_memory() -> None:
    """Returns freed memory to the operating system, if the C library can do that.

    After weights or a tokenizer are loaded, hundreds of megabytes may be free between objects that are still in use.
    malloc would keep this memory for later allocations.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def end_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Makes this process get the signal `how` when its parent `parent_pid` ends, for whatever reason.

    If `how` is not SIGKILL, the process has _LAST_SECONDS to end its children; then it exits.
    """
    _control(_PR_SET_PDEATHSIG, how)
    # A thread watches the parent, too, for two reasons: the parent may have ended before this call, and only Linux has
    # PR_SET_PDEATHSIG.
    threading.Thread(target=_watch_parent, args=(parent_pid, how), daemon=True, name="parent-watch").start()


def die_with_parent(parent_pid: int) -> None:
    """Does the same as `end_with_parent` with SIGKILL. Starts no thread, so the process can fork. Linux only."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def name_process(name: str) -> None:
    """Sets the name of this process in `ps` and `top`, at most 15 characters."""
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
    """Starts a thread that sends signs of life through the pipe `fd` to the supervisor.

    Each sign contains the result of `is_up`. While the result is False, the supervisor waits longer for the next sign,
    because imports may block the thread.
    """
    if fd is not None:
        threading.Thread(target=_pulse, args=(fd, is_up), daemon=True, name="pulse").start()


def _pulse(fd: int, is_up: Callable[[], bool]) -> None:
    while True:
        give_sign(fd, is_up())
        time.sleep(PULSE_SECONDS)


def give_sign(fd: int, is_up: bool) -> None:
    """Sends one sign of life. An event loop calls this every PULSE_SECONDS; other processes call `start_pulse`."""
    os.set_blocking(fd, False)
    # The pipe is full if the supervisor is stopped, and broken if the supervisor has ended. When the supervisor has
    # ended, this process ends soon, too.
    with contextlib.suppress(OSError):
        os.write(fd, b"1" if is_up else b"0")


def node_name() -> str:
    """Returns the Kubernetes node's name, if the pod's manifest sets RAYLOOM_NODE_NAME, else the host's name."""
    return os.environ.get("RAYLOOM_NODE_NAME") or platform.node()


def trial_mark(run_dir: Path) -> Path:
    """Returns the path of a file that exists while the core runs a trial of suspects (core/suspicion.py).

    If the core dies while the file exists, fewer suspects remain, so the supervisor does not count the death.
    """
    return run_dir / "trial"


def drain_mark(run_dir: Path) -> Path:
    """Returns the path of a file that exists while a drain is requested, so that restarted processes drain, too."""
    return run_dir / "draining"


def silence_mark(run_dir: Path) -> Path:
    """Returns the path of a file that the supervisor writes when it kills a core that shows no sign of life.

    The next core then blames no request for this death.
    """
    return run_dir / "silent"


def thread_cpu_clock() -> Callable[[], float]:
    """Returns a clock of the calling thread's CPU seconds, which any other thread may read.

    After the thread has ended, the clock stops. On systems without clocks of threads, it shows the CPU time of the
    whole process.
    """
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS has no such clock
        return time.process_time
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    last = 0.0

    def read() -> float:
        nonlocal last
        with contextlib.suppress(OSError):  # the thread has ended
            last = time.clock_gettime(clock_id)
        return last

    return read


def write_failure(run_dir: Path, cause: str, by: Literal["core", "front"] = "core") -> None:
    """Writes the cause of the engine's failure to a file in the run folder. The supervisor reads this file.

    The EngineCore, the launcher and the supervisor share one file. The EngineCore deletes this file when it begins to
    serve. A front that gives up writes a file of its own, which the EngineCore does not delete.
    """
    with contextlib.suppress(OSError):  # on a full disk only the log has the cause; the exit code stays the same
        (run_dir / _FAILURE_FILES[by]).write_text(cause)


def forget_failure(run_dir: Path, by: Literal["core", "front"] = "core") -> None:
    """Deletes a failure, because a later failure has another cause.

    The EngineCore's failure is deleted once the engine has recovered, that of a front when the front is restarted.
    """
    with contextlib.suppress(OSError):  # there is none, or the disk has become read-only
        (run_dir / _FAILURE_FILES[by]).unlink()


def read_failure(run_dir: Path) -> str:
    """Returns the cause that `write_failure` has written. If there are two causes, returns that of the front. If there
    is none, returns an empty text."""
    for file in (_FAILURE_FILES["front"], _FAILURE_FILES["core"]):
        with contextlib.suppress(OSError):
            if cause := (run_dir / file).read_text():  # on a full disk, the file may be empty
                return cause
    return ""
