"""SchedulerStats: the scheduler's present load, and sums since the EngineCore process started."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class Counters:
    """The sums of the scheduler itself, while it counts."""

    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_corrupt: int = 0  # sequences that ended because their logits were not finite


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or only held by the prefix cache
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # accepted
    generation_tokens: int = 0  # produced
    num_corrupt: int = 0  # sequences that ended because their logits were not finite
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed in all steps
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0  # scheduling and input preparation
