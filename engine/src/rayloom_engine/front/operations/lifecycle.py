"""Lifecycle: whether the front accepts requests, how many are in flight, and why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from rayloom_engine.front.errors import DRAINING, unavailable
from rayloom_engine.protocol.messages import RankStatus
from rayloom_engine.status import State

RETRY_AFTER_S = 2  # what a client is told while the engine starts or drains
STALLED_AFTER_S = 60.0  # an idle core computes a probe every 10 s; a step that takes a minute shows work meanwhile


def state_of(
    *,
    was_ready: bool,
    is_restart: bool,
    is_core_serving: bool,
    is_draining: bool,
    is_stopping: bool,
    failure: str,
    waiting_for: str,
    stall: str,
) -> tuple[State, str]:
    """The state and the reason for it, most serious first. `waiting_for` says what start-up or recovery is at."""
    if failure:
        return "failed", failure
    if is_stopping:
        return "draining", "stopping: running requests finish, new ones are refused"
    if is_draining:
        return "draining", "asked to drain: running requests finish, new ones are refused"
    if not was_ready:
        return ("recovering" if is_restart else "starting"), waiting_for
    if not is_core_serving:
        return "recovering", waiting_for
    if stall:
        return "recovering", stall
    return "serving", ""


def stall_of(
    ranks: Iterable[RankStatus],
    last_token_age_s: float | None,
    status_age_s: float,
    core_age_s: float = 0.0,
    last_work_age_s: float | None = None,
) -> str:
    """Which rank of a serving core hangs, or the core itself, as a sentence; empty when none does.

    Ages are in seconds, as reported `status_age_s` ago. A rank hangs when it has shown no sign of life for
    STALLED_AFTER_S although a step runs, or although an idle core's probe is overdue. `core_age_s` is how long ago the
    core last ended a step or looked for work. `last_work_age_s` is how long ago a rank that computes the present step
    showed work: a long step on a slow machine does not hang.
    """
    if last_work_age_s is not None and last_work_age_s + status_age_s <= STALLED_AFTER_S:
        return ""
    is_probe_overdue = last_token_age_s is None or last_token_age_s + status_age_s > STALLED_AFTER_S
    for rank in ranks:
        age_s = rank.heartbeat_age_s + status_age_s
        is_due = rank.phase == "step" or (rank.phase == "idle" and is_probe_overdue)
        if age_s > STALLED_AFTER_S and is_due:
            return f"rank {rank.rank} has not advanced for {age_s:.0f} s"
    # Ranks in processes of their own show signs of life also while a step is stuck.
    if core_age_s + status_age_s > STALLED_AFTER_S:
        return f"no step has ended for {core_age_s + status_age_s:.0f} s"
    return ""


class Lifecycle:
    """What decides between accepting and refusing. For one event loop."""

    def __init__(self, *, is_restart: bool = False) -> None:
        """`is_restart`: a front before this one has died, so requests wait for readiness instead of being refused."""
        self.is_restart = is_restart
        self.was_loaded = False  # this front or one before it was ready
        self.was_ready = False  # the first load is done; stays true while the core is being restarted
        self.is_core_serving = False
        self.is_draining = False  # asked to by the admin port, which can take it back
        self.is_stopping = False  # the process ends; for good
        self._draining_since = 0.0  # by time.monotonic; the first of drain and stop
        self.failure = ""  # the first cause, once given up
        self.waiting_for = "waiting for the core"
        self.stall = ""  # which rank hangs
        self.num_in_flight = 0
        self.num_held = 0  # requests that wait for a restarted front
        # Ends connections that are kept alive: a client that keeps one would be refused here while others would serve.
        self.let_go: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()  # replaced with every change

    @property
    def state(self) -> tuple[State, str]:
        return state_of(
            was_ready=self.was_ready,
            is_restart=self.is_restart,
            is_core_serving=self.is_core_serving,
            is_draining=self.is_draining,
            is_stopping=self.is_stopping,
            failure=self.failure,
            waiting_for=self.waiting_for,
            stall=self.stall,
        )

    @property
    def accepts(self) -> bool:
        """Also true during a recovery: then requests wait and go on."""
        return self.was_ready and not self._refuses

    @property
    def _refuses(self) -> bool:
        return self.drains or bool(self.failure)

    @property
    def drains(self) -> bool:
        """Other engines are to have the requests of those who ask here."""
        return self.is_draining or self.is_stopping

    def become_ready(self) -> None:
        """The first load is done."""
        self.was_ready = self.was_loaded = True
        self.on_ready()
        self._wake()

    def drain(self, is_draining: bool, age_s: float = 0.0) -> None:
        """Begin or take back a drain that was asked for `age_s` ago. One that has begun goes on as it is."""
        if is_draining and not self.drains:
            self._draining_since = time.monotonic() - age_s
        self.is_draining = is_draining
        if is_draining:
            self.let_go()
        self._wake()

    def drain_left_s(self, drain_s: float) -> float:
        """What is left of the `drain_s` that running requests have: a stop after a drain gives them no second term."""
        return max(0.0, drain_s - (time.monotonic() - self._draining_since))

    def stop(self) -> None:
        """Refuse new requests for good."""
        if not self.drains:
            self._draining_since = time.monotonic()
        self.is_stopping = True
        self.let_go()
        self._wake()

    def fail(self, cause: str) -> None:
        """Give up. The first cause stays."""
        self.failure = self.failure or cause
        self._wake()

    async def wait_after_restart(self, timeout_s: float) -> None:
        """In a restarted front: wait until requests are accepted, or refused for good, at most `timeout_s`."""
        self.num_held += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_restart and not self.was_ready and not self._refuses:
                    await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self.num_held -= 1

    def check_accepts(self) -> None:
        """Raises ApiError 503 with a sentence when new requests are refused."""
        if self.accepts:
            return
        state, reason = self.state
        if state == "failed":
            raise unavailable(f"the engine failed: {reason}", "engine_failed", 30)
        if state == "draining":
            raise unavailable(
                "the engine is draining before it stops; send the request to another one",
                DRAINING,
                RETRY_AFTER_S,
                close=True,
            )
        raise unavailable(f"the engine is {state} ({reason}); try again soon", "engine_starting", RETRY_AFTER_S)

    def check_alive(self) -> None:
        """Raises ApiError 503 when the model was never loaded so far, or the engine gave up."""
        if not self.was_loaded or self.failure:
            state, reason = self.state
            raise unavailable(f"the engine is {state}: {reason}", f"engine_{state}", RETRY_AFTER_S)

    def enter(self) -> None:
        """Count an accepted request."""
        self.num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """The request was answered in full, or its client is gone."""
        self.num_in_flight -= 1
        assert self.num_in_flight >= 0
        if self.num_in_flight == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when `timeout_s` passed first."""
        if self._idle.is_set():  # also with no time to wait
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
