"""SchedulerConfig: the limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.window import most_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int  # tokens in a block
    max_num_seqs: int  # limit of running sequences
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # limit of tokens of a sequence, prompt included; the KV blocks suffice for one such sequence
    max_queued: int  # limit of waiting sequences; more are refused
    enable_prefix_caching: bool = True
    num_kept_blocks: int | None = None  # limit of cached blocks at the beginning (cache_growth.py); None: no limit
    num_host_slots: int = 0  # copies of KV blocks that the host memory of every rank has room for
    depth: int = 1  # limit of plans in flight
    num_ahead: int = 0  # limit of plans in flight that compute a placeholder of the same sequence
    max_loras: int = 0  # adapters that the ranks hold at once
    window: int | None = None  # positions that a token attends to, its own included; None: some layer attends to all
    speculation: SpeculationConfig | None = None  # None: no drafts

    def __post_init__(self) -> None:
        assert self.most_blocks(self.max_model_len) <= self.num_blocks, "the longest sequence must fit the pool"
        assert 0 <= self.num_ahead < self.depth, "one of the plans in flight has no placeholder"
        assert not (self.num_ahead and self.speculation), "a draft needs the token that a placeholder stands for"

    @property
    def num_groups(self) -> int:
        """Groups of sequences that take turns: one for each pipeline stage, because stages compute different plans."""
        return self.depth - self.num_ahead

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return most_blocks(num_tokens, self.window, self.max_num_batched_tokens, self.block_size)
