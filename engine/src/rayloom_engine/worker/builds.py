"""Builds: grammars that one thread of a rank builds, while steps compute the other sequences.

A wait for a build counts as progress of the rank, so it is never taken for a hang. Its limit is PATIENCE_S: if the
thread finishes no build for this time, the present build is given up, and the others continue on a new thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.deep_stack import deep_stack_pool

_T = TypeVar("_T")

PATIENCE_S = 5.0
_SLICE_S = 0.1  # progress is reported after each slice, which is much shorter than hang_seconds


class Build(Generic[_T]):
    """An object that the thread makes."""

    def __init__(self, make: Callable[[], _T], patience: int = 1) -> None:
        """`patience`: the build is given up after this many times PATIENCE_S."""
        self.make = make
        self.patience = patience
        self.future: Future[_T] = Future()
        self.is_begun = False  # given to the thread
        self.is_overdue = False  # given up, unless it ends after all


class Builds:
    """Runs builds one by one on a thread of its own. All methods but `begin` must be called by one other thread."""

    def __init__(self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.report_progress: Callable[[], None] = lambda: None  # called while a step waits
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor = deep_stack_pool("forms")
        self._num_slices = round(patience_s / _SLICE_S)
        self._clock = clock
        self._noted_at = 0.0  # time of the last wait that was counted
        # Waits are counted in slices: a process that was stopped for a while has waited one slice.
        self._num_waited = 0.0  # slices since the thread last finished a build
        self._present: Build[Any] | None = None  # the build that the thread makes now

    def start(self, make: Callable[[], _T]) -> Build[_T]:
        """Returns a build whose result is that of `make`. The thread takes builds in the order of their starts."""
        build = Build(make)
        self.begin(build)
        return build

    def begin(self, build: Build[Any]) -> None:
        """Gives a build to the thread, unless it has it already. May be called by any thread."""
        with self._lock:
            if not build.is_begun:
                self._submit(build)
                build.is_begun = True

    def wait_for(self, build: Build[_T]) -> _T:
        """Returns what the build made, or raises its exception. Raises GrammarFault if the build is given up."""
        while not self.is_done(build):
            self.wait_a_slice(build)
        if not build.future.done() or build.future.cancelled():
            raise GrammarFault(
                f"its grammar was not built in {self._num_slices * _SLICE_S:g} s; make the grammar simpler"
            )
        return build.future.result()

    def is_done(self, build: Build[Any]) -> bool:
        """True if `wait_for` returns or raises at once."""
        if build.future.cancelled() and not build.is_overdue:
            self._submit(build)
        return build.future.done() or build.is_overdue

    def wait_a_slice(self, build: Build[Any]) -> None:
        """Waits until the build ends, but at most 0.1 s."""
        self.report_progress()
        self._num_waited += 1 / (self._present or build).patience
        wait([build.future], timeout=_SLICE_S)
        self._noted_at = self._clock()  # so that `note_wait` does not count the same time again
        self._check_patience()

    def note_wait(self) -> None:
        """Counts the time since the last call as a wait. For each step that does without a build."""
        now = self._clock()
        patience = 1 if self._present is None else self._present.patience
        self._num_waited += min(1.0, (now - self._noted_at) / _SLICE_S) / patience
        self._noted_at = now
        self._check_patience()

    def _check_patience(self) -> None:
        if self._num_waited >= self._num_slices:
            self._give_up()

    def _submit(self, build: Build[Any]) -> None:
        build.future = self._pool.submit(self._run, build)

    def _run(self, build: Build[_T]) -> _T:
        self._present = build
        try:
            return build.make()
        finally:
            self._num_waited = 0.0

    def _give_up(self) -> None:
        """Gives up the present build. `is_done` submits the cancelled builds again, to the new thread."""
        self._num_waited = 0.0
        if self._present is not None:
            self._present.is_overdue = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = deep_stack_pool("forms")
