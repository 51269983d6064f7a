"""RestartBudget: limits how often a dead process is restarted, and sets the back-off before each restart."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0  # seconds; only deaths within this time count
_MAX_BACKOFF_SECONDS = 10.0


def backoff_seconds(num_recent_restarts: int) -> float:
    """Returns the back-off before the next restart: 0 the first time, then 0.5, 1, 2, ... up to 10 seconds."""
    return 0.0 if num_recent_restarts == 0 else min(_MAX_BACKOFF_SECONDS, 0.5 * 2 ** (num_recent_restarts - 1))


class RestartBudget:
    """Counts the deaths of one process, or other events that end with a restart."""

    def __init__(self, budget: int) -> None:
        """`budget`: number of restarts allowed within WINDOW_SECONDS."""
        self._budget = budget
        self._deaths: deque[float] = deque()

    def wait_after_death(self, now: float) -> float | None:
        """Counts a death at `now` (time.monotonic). Returns the back-off; None if the restart budget is spent."""
        while self._deaths and now - self._deaths[0] > WINDOW_SECONDS:
            self._deaths.popleft()
        wait = backoff_seconds(len(self._deaths))
        self._deaths.append(now)
        return wait if len(self._deaths) <= self._budget else None

    def excuse(self) -> None:
        """Removes the last death from the count."""
        if self._deaths:
            self._deaths.pop()
