"""RecoveryLog: when the core or a front was lost and how long it took until tokens could flow again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayloom_engine.protocol.messages import PhaseStatus

KEPT = 100  # what /status shows


@dataclass(slots=True, kw_only=True)
class Recovery:
    cause: str
    process: str
    node: str
    at: float  # Unix time
    started_s: float  # monotonic
    seconds: float | None = None  # None while it lasts
    replayed_requests: int = 0
    phases: tuple[PhaseStatus, ...] = ()  # of the rebuild, once it is over

    def end(self, now_s: float, phases: tuple[PhaseStatus, ...] = ()) -> None:
        """Tokens can flow again."""
        self.seconds = now_s - self.started_s
        self.phases = phases


class RecoveryLog:
    """The last recoveries; at most one of the core is open."""

    def __init__(self) -> None:
        self.recoveries: deque[Recovery] = deque(maxlen=KEPT)
        self.open: Recovery | None = None

    def begin(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> None:
        """Note a loss. A further loss before tokens flowed again belongs to the same recovery."""
        if self.open is None:
            self.open = self.add(cause, process, node, at=at, now_s=now_s)

    def add(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> Recovery:
        """Note a loss that the core has no part in; whoever adds it ends it."""
        recovery = Recovery(cause=cause, process=process, node=node, at=at, started_s=now_s)
        self.recoveries.append(recovery)
        return recovery

    def replayed(self, num_requests: int) -> None:
        if self.open is not None:
            self.open.replayed_requests = max(self.open.replayed_requests, num_requests)

    def end(self, now_s: float, phases: tuple[PhaseStatus, ...] = ()) -> Recovery | None:
        """Tokens can flow again, after these phases. The recovery that this ends, if one was open."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.end(now_s, phases)
        return ended
