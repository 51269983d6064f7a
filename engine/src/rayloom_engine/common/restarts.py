"""RestartBudget: how soon a process that died is started again, and when it is not any more."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0  # deaths are counted over this long
_MAX_BACKOFF_SECONDS = 10.0


def backoff_seconds(num_recent_restarts: int) -> float:
    """How long to wait before the next restart: nothing the first time, then 0.5, 1, 2, ... up to 10 seconds."""
    return 0.0 if num_recent_restarts == 0 else min(_MAX_BACKOFF_SECONDS, 0.5 * 2 ** (num_recent_restarts - 1))


class RestartBudget:
    """Counts the deaths of one process, or of one kind of event that is mended by starting again."""

    def __init__(self, budget: int) -> None:
        """`budget`: restarts within ten minutes."""
        self._budget = budget
        self._deaths: deque[float] = deque()

    def wait_after_death(self, now: float) -> float | None:
        """Books a death at `now` (time.monotonic). Seconds until the restart; None when the budget is spent."""
        while self._deaths and now - self._deaths[0] > WINDOW_SECONDS:
            self._deaths.popleft()
        wait = backoff_seconds(len(self._deaths))
        self._deaths.append(now)
        return wait if len(self._deaths) <= self._budget else None

    def excuse(self) -> None:
        """Takes the last death off the books."""
        if self._deaths:
            self._deaths.pop()
