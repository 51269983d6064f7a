"""Lifecycle: whether the front accepts requests, how many are in flight, and why not."""

from __future__ import annotations

import asyncio

from rayloom_engine.front.errors import unavailable
from rayloom_engine.status import State

RETRY_AFTER_S = 2  # what a client is told while the engine starts or drains


def state_of(
    *,
    was_ready: bool,
    is_core_serving: bool,
    is_draining: bool,
    failure: str,
    waiting_for: str,
) -> tuple[State, str]:
    """The state and the reason for it, most serious first. `waiting_for` says what start-up or recovery is at."""
    if failure:
        return "failed", failure
    if is_draining:
        return "draining", "asked to drain: running requests finish, new ones are refused"
    if not was_ready:
        return "starting", waiting_for
    if not is_core_serving:
        return "recovering", waiting_for
    return "serving", ""


class Lifecycle:
    """What decides between accepting and refusing. For one event loop."""

    def __init__(self) -> None:
        self.was_ready = False  # the first load is done; stays true while the core is being restarted
        self.is_core_serving = False
        self.is_draining = False
        self.failure = ""  # the first cause, once given up
        self.waiting_for = "waiting for the core"
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> tuple[State, str]:
        return state_of(
            was_ready=self.was_ready,
            is_core_serving=self.is_core_serving,
            is_draining=self.is_draining,
            failure=self.failure,
            waiting_for=self.waiting_for,
        )

    @property
    def accepts(self) -> bool:
        """Also true during a recovery: then requests wait and go on."""
        return self.was_ready and not self.is_draining and not self.failure

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
                "engine_draining",
                RETRY_AFTER_S,
                close=True,
            )
        raise unavailable(f"the engine is starting ({reason}); try again soon", "engine_starting", RETRY_AFTER_S)

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
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
