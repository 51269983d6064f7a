"""RankStarter: the interface that executors `mp` and `ray` implement to start ranks for the launcher."""

from __future__ import annotations

from typing import Protocol

from rayloom_engine.models.checkpoint.progress import Progress

NO_CORE = "it found no core"  # the cause that `wait` returns for a rank that exited by itself


class RankStarter(Protocol):
    """Starts ranks and reports when they end. At most one start of each rank may run at a time."""

    def prepare(self, progress: Progress) -> None:
        """Finds and reserves the resources of all ranks. Raises ConfigError if there are too few."""

    def start(self, rank: int, incarnation: int) -> None: ...

    def kill(self, rank: int) -> None:
        """Kills a rank, if it runs. `wait` returns the rank once its process has ended."""

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        """Waits until a rank has ended. Returns (rank, cause) of all ended ranks; after `timeout_s` an empty list."""

    def close(self) -> None:
        """Ends all ranks."""
