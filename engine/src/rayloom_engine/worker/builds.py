"""Builds: grammars that one thread of a rank builds, while steps compute the other sequences.

A wait for a build counts as progress of the rank, so it is never taken for a hang. A build is given up once it has used
CPU_S seconds of the thread's CPU time, and the other builds continue on a new thread. The limit is CPU time, because
CPU time depends on the grammar alone. Wall time also depends on other work on the machine. WALL_S limits the waits for
a build that gets no CPU time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from rayloom_engine.common.process import thread_cpu_clock
from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.deep_stack import deep_stack_pool

_T = TypeVar("_T")

CPU_S = 5.0
WALL_S = 60.0
_SLICE_S = 0.1  # progress is reported after each slice, which is much shorter than hang_seconds


class Build(Generic[_T]):
    """An object that the thread of Builds makes."""

    def __init__(self, make: Callable[[], _T], *, has_cpu_limit: bool = True) -> None:
        self.make = make
        self.has_cpu_limit = has_cpu_limit
        self.future: Future[_T] = Future()
        self.is_begun = False  # submitted to the thread
        # Why the build was given up; empty if it was not given up. If the build has a result in spite of this,
        # `wait_for` returns the result.
        self.given_up = ""


class _Turn:
    """The build that the thread makes now, and its times. Create it on that thread: it reads the thread's CPU clock."""

    def __init__(self, build: Build[Any]) -> None:
        self.build = build
        # Seconds that steps have waited. A wait counts as at most _SLICE_S, so that a stop of the process does not
        # count.
        self.waited_s = 0.0
        self._cpu_clock = thread_cpu_clock()
        self._began_s = self._cpu_clock()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the thread since the build began."""
        return self._cpu_clock() - self._began_s


class Builds:
    """Runs builds one by one on a thread of its own.

    Any thread may call `begin`. All other methods are for one thread alone, which must not be the thread of the builds.
    """

    def __init__(
        self, cpu_s: float = CPU_S, wall_s: float = WALL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Limits of each build: `cpu_s` in CPU seconds of the thread, `wall_s` in seconds that steps waited for it."""
        self.report_progress: Callable[[], None] = lambda: None  # called while a step waits
        self._lock = threading.Lock()  # guards `_pool` and `_present`
        self._pool: ThreadPoolExecutor = deep_stack_pool("forms")
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._clock = clock
        self._noted_at = 0.0  # time of the last wait that was counted
        self._present: _Turn | None = None  # the build that the thread makes now

    def start(self, make: Callable[[], _T]) -> Build[_T]:
        """Returns a build whose result is that of `make`. The thread runs builds in the order of these calls."""
        build = Build(make)
        self.begin(build)
        return build

    def begin(self, build: Build[Any]) -> None:
        """Submits a build to the thread, unless it was submitted before. Any thread may call it."""
        with self._lock:
            if not build.is_begun:
                self._submit(build)
                build.is_begun = True

    def wait_for(self, build: Build[_T]) -> _T:
        """Returns the result of the build, or raises its exception. Raises GrammarFault if the build is given up."""
        while not self.is_done(build):
            self.wait_a_slice(build)
        if not build.future.done() or build.future.cancelled():
            raise GrammarFault(build.given_up)
        return build.future.result()

    def is_done(self, build: Build[Any]) -> bool:
        """True if `wait_for` returns or raises at once."""
        if build.future.cancelled() and not build.given_up:
            with self._lock:
                self._submit(build)
        return build.future.done() or bool(build.given_up)

    def wait_a_slice(self, build: Build[Any]) -> None:
        """Waits until the build ends, but at most 0.1 s."""
        self.report_progress()
        turn = self._present
        wait([build.future], timeout=_SLICE_S)
        self._noted_at = self._clock()  # so that `note_wait` does not count the same time again
        self._count(turn, _SLICE_S)

    def note_wait(self) -> None:
        """Counts the time since the last call as a wait. Call it in each step in which a slot waits for a build."""
        now = self._clock()
        self._count(self._present, min(_SLICE_S, now - self._noted_at))
        self._noted_at = now

    def _count(self, turn: _Turn | None, seconds: float) -> None:
        """Counts a wait for the thread's present build, and gives the build up if it has reached a limit."""
        if turn is None:
            return
        turn.waited_s += seconds
        cpu_s = turn.cpu_s
        if turn.build.has_cpu_limit and cpu_s >= self._cpu_s:
            self._give_up(turn, f"its grammar was not built in {self._cpu_s:g} s of CPU time; make the grammar simpler")
        elif turn.waited_s >= self._wall_s:
            self._give_up(
                turn,
                f"its grammar was not built in {self._wall_s:g} s, in which the thread got {cpu_s:.1f} s of CPU time; "
                "send the request again when the machine has less work",
            )

    def _submit(self, build: Build[Any]) -> None:
        build.future = self._pool.submit(self._run, build)

    def _run(self, build: Build[_T]) -> _T:
        turn = _Turn(build)
        with self._lock:
            self._present = turn
        try:
            return build.make()
        finally:
            with self._lock:
                if self._present is turn:  # otherwise the build was given up, and a new thread runs another one
                    self._present = None

    def _give_up(self, turn: _Turn, why: str) -> None:
        """Gives up the present build. `is_done` submits the cancelled builds again, to the new thread."""
        with self._lock:
            if self._present is not turn:  # the build has just ended
                return
            turn.build.given_up = why
            self._present = None
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = deep_stack_pool("forms")
