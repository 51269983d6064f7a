"""Which executor starts the ranks, and why. Pure, so that the choice can be explained before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayloom_engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    name: Literal["uni", "mp", "ray"]
    reason: str

    @property
    def has_rank_processes(self) -> bool:
        """False when the core is its own only rank."""
        return self.name != "uni"


def choose_executor(config: EngineConfig) -> ExecutorChoice:
    """The executor for a config: an explicit setting, else ray where a cluster is named, uni for one rank, or mp."""
    if config.executor != "auto":
        return ExecutorChoice(config.executor, "set")
    if config.ray_address is not None:
        return ExecutorChoice("ray", "ray_address is set")
    if config.world_size == 1:
        return ExecutorChoice("uni", "one rank")
    return ExecutorChoice("mp", f"{config.world_size} ranks on this machine")
