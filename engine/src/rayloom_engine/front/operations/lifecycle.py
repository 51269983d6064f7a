"""Lifecycle: tells whether the front accepts requests, why it refuses them, and how many requests are unanswered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rayloom_engine.front.http.errors import DRAINING, unavailable
from rayloom_engine.protocol.messages import CoreStatus
from rayloom_engine.status import State

RETRY_AFTER_S = 2  # Retry-After of refusals while the engine starts or drains
STALLED_AFTER_S = 60.0  # seconds; idle ranks compute a probe every 10 s, busy ranks report work even in a long step


def stall_of(core: CoreStatus, status_age_s: float) -> str:
    """Returns a sentence about the hung rank of a serving core, or about the hung core; empty if neither hangs.

    `core` was received `status_age_s` ago. A rank hangs if it has sent no heartbeat for STALLED_AFTER_S while a step
    runs, or while the probe of an idle core is overdue. Nothing counts as hung while a computing rank reports recent
    work: a step may be long on a slow machine.
    """
    if core.last_work_age_s is not None and core.last_work_age_s + status_age_s <= STALLED_AFTER_S:
        return ""
    is_probe_overdue = core.last_token_age_s is None or core.last_token_age_s + status_age_s > STALLED_AFTER_S
    for rank in core.ranks:
        age_s = rank.heartbeat_age_s + status_age_s
        is_due = rank.phase == "step" or (rank.phase == "idle" and is_probe_overdue)
        if age_s > STALLED_AFTER_S and is_due:
            return f"rank {rank.rank} has not advanced for {age_s:.0f} s"
    # Ranks with processes of their own send heartbeats even while a step hangs. So the core's own heartbeat is checked,
    # too.
    core_age_s = core.heartbeat_age_s + status_age_s
    if core_age_s > STALLED_AFTER_S:
        return f"no step has ended for {core_age_s:.0f} s"
    return ""


class Lifecycle:
    """Decides whether requests are accepted. For one event loop."""

    def __init__(self, *, is_restart: bool = False) -> None:
        """`is_restart`: an earlier front has died.

        Requests then wait for this front for at most `Waits.ready_s`, and are not refused at once.
        """
        self.is_restart = is_restart
        self.was_loaded = False  # this front, or an earlier front of this engine, has been ready
        self.was_ready = False  # the first load has finished; stays true while the core restarts
        self.is_core_serving = False
        self.is_draining = False  # requested at the admin port; another request there can cancel it
        self.is_stopping = False  # the process is exiting; cannot be cancelled
        self._draining_since = 0.0  # time.monotonic of the first drain or stop
        self.failure = ""  # the first cause of failure; empty while the engine has not failed
        self.waiting_for = "waiting for the core"  # the current phase of a start or recovery
        self.stall = ""  # a sentence about the hung rank or core; empty if none hangs
        self.num_held = 0  # requests that wait until a restarted front is ready
        self.num_in_flight = 0  # requests that are computed, or whose handler sends the answer
        self.num_readers = 0  # connections that read a kept answer, perhaps after the handler of the answer has ended
        # In a gateway with several models, each model has a lifecycle, and `process` is the lifecycle of the process.
        self.process: Lifecycle | None = None
        # Closes keep-alive connections, so that clients send their next requests to other engines. This engine would
        # refuse these requests.
        self.close_connections: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_drain: Callable[[bool], None] = lambda is_draining: None  # called whenever a drain begins or ends
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()  # replaced by a new Event at every change

    @property
    def state(self) -> tuple[State, str]:
        """The state and its reason: the most serious state that applies."""
        if self.failure:
            return "failed", self.failure
        process = self.process
        if self.is_stopping or (process is not None and process.is_stopping):
            return "draining", "stopping: running requests finish, new ones are refused"
        if self.drains:
            return "draining", "asked to drain: running requests finish, new ones are refused"
        if not self.was_ready:
            return ("recovering" if self.is_restart else "starting"), self.waiting_for
        if not self.is_core_serving:
            return "recovering", self.waiting_for
        if self.stall:
            return "recovering", self.stall
        return "serving", ""

    @property
    def accepts(self) -> bool:
        """True if new requests are accepted.

        During a recovery, new requests are accepted and wait until the recovery ends.
        """
        return self.was_ready and not self._refuses

    @property
    def _refuses(self) -> bool:
        return self.drains or bool(self.failure)

    @property
    def drains(self) -> bool:
        """True in a drain and after a stop: clients should use other engines."""
        return self.is_draining or self.is_stopping or (self.process is not None and self.process.drains)

    def become_ready(self) -> None:
        """Records that the first load has finished."""
        self.was_ready = True
        self.was_loaded = True
        self.on_ready()
        self.wake()

    def drain(self, is_draining: bool, age_s: float = 0.0) -> None:
        """Starts or cancels a drain that was requested `age_s` ago. A repeated request does not reset the age."""
        if is_draining and not self.drains:
            self._draining_since = time.monotonic() - age_s
        self.is_draining = is_draining
        self.on_drain(self.drains)
        if is_draining:
            self.close_connections()
        self.wake()

    def drain_left_s(self, drain_s: float) -> float:
        """Returns the seconds that running requests have left of `drain_s`.

        If a stop follows a drain, the seconds count from the start of the drain.
        """
        return max(0.0, drain_s - self.drain_age_s)

    @property
    def drain_age_s(self) -> float:
        """Seconds since the drain or the stop, whichever came first."""
        return time.monotonic() - self._draining_since

    def stop(self) -> None:
        """Refuses new requests from now on. This cannot be cancelled."""
        if not self.drains:
            self._draining_since = time.monotonic()
        self.is_stopping = True
        self.on_drain(True)
        self.close_connections()
        self.wake()

    def fail(self, cause: str) -> None:
        """Refuses all requests from now on because the engine has failed. Keeps the first cause."""
        self.failure = self.failure or cause
        self.wake()

    async def wait_after_restart(self, timeout_s: float) -> None:
        """In a restarted front, waits up to `timeout_s` until requests are accepted, or refused for good.

        In any other front, returns at once.
        """
        if self.is_restart:
            self.num_held += 1
            try:
                await self.wait_ready(timeout_s)
            finally:
                self.num_held -= 1

    async def wait_ready(self, timeout_s: float, is_awaited: Callable[[], bool] = lambda: False) -> None:
        """Waits up to `timeout_s` until requests are accepted for the first time, or refused for good.

        Also waits while `is_awaited` returns True. Call `wake` when its result changes.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (not self.was_ready or is_awaited()) and not self._refuses:
                    await self._changed.wait()
        except TimeoutError:
            return

    def check_accepts(self) -> None:
        """Raises ApiError 503 with the reason if new requests are refused."""
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
        """Raises ApiError 503 if the model was never loaded, or the engine has failed."""
        if not self.was_loaded or self.failure:
            state, reason = self.state
            raise unavailable(f"the engine is {state}: {reason}", f"engine_{state}", RETRY_AFTER_S)

    def enter(self) -> None:
        """Counts an accepted request as in flight."""
        if self.process is not None:
            self.process.enter()
        self.num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Stops counting a request as in flight: it is answered in full, or its client is gone."""
        if self.process is not None:
            self.process.leave()
        self.num_in_flight -= 1
        assert self.num_in_flight >= 0
        self._check_idle()

    def begin_read(self) -> None:
        """Counts a connection that reads a kept answer."""
        if self.process is not None:
            self.process.begin_read()
        self.num_readers += 1
        self._idle.clear()

    def end_read(self) -> None:
        """Stops counting a connection: it got the whole kept answer, or it broke."""
        if self.process is not None:
            self.process.end_read()
        self.num_readers -= 1
        assert self.num_readers >= 0
        self._check_idle()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight and no connection reads a kept answer.

        Returns False if `timeout_s` passes first.
        """
        if self._idle.is_set():  # With a time-out of 0, wait_for would raise TimeoutError even if nothing is in flight.
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _check_idle(self) -> None:
        if self.num_in_flight == 0 and self.num_readers == 0:
            self._idle.set()

    def wake(self) -> None:
        """Makes waiting requests check the state again, for example because the process begins to drain."""
        self._changed.set()
        self._changed = asyncio.Event()
