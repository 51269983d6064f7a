"""RecoveryLog: when the core was lost and how long it took until tokens could flow again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 100  # what /status shows


@dataclass(slots=True, kw_only=True)
class Recovery:
    cause: str
    process: str
    at: float  # Unix time
    started_s: float  # monotonic
    seconds: float | None = None  # None while it lasts
    replayed_requests: int = 0


class RecoveryLog:
    """The last recoveries; at most one is open."""

    def __init__(self) -> None:
        self.recoveries: deque[Recovery] = deque(maxlen=KEPT)
        self.open: Recovery | None = None

    def begin(self, cause: str, process: str, *, at: float, now_s: float) -> None:
        """Note a loss. A further loss before tokens flowed again belongs to the same recovery."""
        if self.open is None:
            self.open = Recovery(cause=cause, process=process, at=at, started_s=now_s)
            self.recoveries.append(self.open)

    def replayed(self, num_requests: int) -> None:
        if self.open is not None:
            self.open.replayed_requests = max(self.open.replayed_requests, num_requests)

    def end(self, now_s: float) -> Recovery | None:
        """Tokens can flow again. The recovery that this ends, if one was open."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.seconds = now_s - ended.started_s
        return ended
