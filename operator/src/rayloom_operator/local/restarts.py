"""Restarts: the back-off of a local process that ends by itself. Pure. The operator in a cluster has the same rules."""

from __future__ import annotations

from rayloom_operator.api.recovery import Recovery
from rayloom_operator.decide.recovery import back_off_seconds

FORGET_AFTER_S = 600.0  # once a process has served for this many seconds, its earlier ends do not count


class Restarts:
    """The ends of one process since it last served for FORGET_AFTER_S."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._num_ends = 0

    @property
    def is_spent(self) -> bool:
        """True if the process has ended more often than `recovery.restartBudget` allows."""
        return self._num_ends > self._recovery.restart_budget

    def ended(self, served_s: float) -> int:
        """Counts an end after `served_s` seconds of serving. Returns the seconds before the next start."""
        if served_s >= FORGET_AFTER_S:
            self._num_ends = 0
        self._num_ends += 1
        return back_off_seconds(self._num_ends, self._recovery)
