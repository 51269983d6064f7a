"""RankStarter: what the ways of starting ranks have in common. The rest of the launcher knows only this."""

from __future__ import annotations

from typing import Protocol

from rayloom_engine.models.checkpoint.progress import Progress

NO_CORE = "it found no core"  # cause of the end of a rank that ended by itself


class RankStarter(Protocol):
    """Starts ranks and sees them end. One start of a rank runs at a time."""

    def prepare(self, progress: Progress) -> None:
        """Finds and reserves what the ranks need. Raises ConfigError when there is too little of it."""

    def start(self, rank: int, incarnation: int) -> None: ...

    def kill(self, rank: int) -> None:
        """Ends the running start of a rank by force; `wait` tells when it has ended. Nothing when none runs."""

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        """The ranks that have ended and why, as soon as one has; empty after the time."""

    def close(self) -> None:
        """Ends every rank."""
