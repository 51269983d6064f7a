"""RecoveryLog: losses of the EngineCore, a rank or a front, and the time until tokens could flow again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayloom_engine.protocol.messages import PhaseProgress

KEPT = 100  # records in /status


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    cause: str
    process: str
    node: str
    at: float  # Unix time
    started_s: float  # monotonic
    seconds: float | None = None  # None while it lasts
    replayed_requests: int = 0
    phases: tuple[PhaseProgress, ...] = ()  # of the rebuild, once it has ended

    def end(self, now_s: float, phases: tuple[PhaseProgress, ...] = ()) -> None:
        """Tokens can flow again."""
        self.seconds = now_s - self.started_s
        self.phases = phases


class RecoveryLog:
    """The last recoveries; at most one of the core or its ranks is open."""

    def __init__(self) -> None:
        self.recoveries: deque[RecoveryRecord] = deque(maxlen=KEPT)
        self.open: RecoveryRecord | None = None

    def begin(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> None:
        """Records a loss. A further loss before tokens flow again belongs to the same recovery."""
        if self.open is None:
            self.open = self.add(cause, process, node, at=at, now_s=now_s)

    def add(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> RecoveryRecord:
        """Records a loss that does not concern the core; the caller ends it."""
        recovery = RecoveryRecord(cause=cause, process=process, node=node, at=at, started_s=now_s)
        self.recoveries.append(recovery)
        return recovery

    def replayed(self, num_requests: int) -> None:
        if self.open is not None:
            self.open.replayed_requests = max(self.open.replayed_requests, num_requests)

    def end(self, now_s: float, phases: tuple[PhaseProgress, ...] = ()) -> RecoveryRecord | None:
        """Ends the open recovery, after these phases: tokens can flow again. Returns it; None when none was open."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.end(now_s, phases)
        return ended
