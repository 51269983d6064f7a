"""RankStarter: the interface of the ways to start ranks; the rest of the launcher knows only this."""

from __future__ import annotations

from typing import Protocol

from rayloom_engine.models.checkpoint.progress import Progress

NO_CORE = "it found no core"  # cause of the end of a rank that exited by itself


class RankStarter(Protocol):
    """Starts ranks and reports their ends. A rank has at most one start at a time."""

    def prepare(self, progress: Progress) -> None:
        """Finds and reserves the resources of all ranks. Raises ConfigError when there are too few."""

    def start(self, rank: int, incarnation: int) -> None: ...

    def kill(self, rank: int) -> None:
        """Kills the running start of a rank, if any; `wait` returns it once it has ended."""

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        """(rank, cause) of ranks that have ended, as soon as one has; empty after `timeout_s`."""

    def close(self) -> None:
        """Ends every rank."""
