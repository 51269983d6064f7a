"""RecoveryLog: losses of the EngineCore, a rank or a front, and for how long each loss interrupted streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayloom_engine.protocol.messages import PhaseProgress

KEPT = 100  # the most records that /status shows


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    cause: str
    process: str  # the lost process: "core", "front" or "rank N"
    node: str
    at: float  # Unix time
    started_s: float  # time.monotonic
    seconds: float | None = None  # None until the recovery has ended
    replayed_requests: int = 0
    phases: tuple[PhaseProgress, ...] = ()  # phases of the rebuild, known once it has ended

    def end(self, now_s: float, phases: tuple[PhaseProgress, ...] = ()) -> None:
        """Marks the recovery as ended: tokens can flow again."""
        self.seconds = now_s - self.started_s
        self.phases = phases

    def sentence(self) -> str:
        """Returns a line for the log about a recovery that has ended."""
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in self.phases)
        return (
            f"{self.process} of node {self.node} is back after {self.seconds or 0.0:.2f} s ({self.cause}; {phases}); "
            f"{self.replayed_requests} requests continue"
        )


class RecoveryLog:
    """The latest recoveries. At most one recovery of the core or its ranks is open at a time."""

    def __init__(self) -> None:
        self.recoveries: deque[RecoveryRecord] = deque(maxlen=KEPT)
        self.open: RecoveryRecord | None = None

    def begin(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> None:
        """Starts a recovery if none is open. Further losses belong to the open recovery, until tokens flow again."""
        if self.open is None:
            self.open = self.add(cause, process, node, at=at, now_s=now_s)

    def add(self, cause: str, process: str, node: str, *, at: float, now_s: float) -> RecoveryRecord:
        """Records a loss, such as a front's, without opening a recovery. The caller ends the returned record."""
        recovery = RecoveryRecord(cause=cause, process=process, node=node, at=at, started_s=now_s)
        self.recoveries.append(recovery)
        return recovery

    def replayed(self, num_requests: int) -> None:
        if self.open is not None:
            self.open.replayed_requests = max(self.open.replayed_requests, num_requests)

    def end(self, now_s: float, phases: tuple[PhaseProgress, ...] = ()) -> RecoveryRecord | None:
        """Ends the open recovery and returns it; None if no recovery is open. Call it when tokens can flow again.

        `phases`: the phases of the rebuild.
        """
        ended, self.open = self.open, None
        if ended is not None:
            ended.end(now_s, phases)
        return ended
