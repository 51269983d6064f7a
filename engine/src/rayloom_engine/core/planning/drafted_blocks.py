"""DraftedBlocks: the core's knowledge of the blocks in which the draft model has KV.

A block of the prefix cache has KV of the target model, but the draft model may have left out the sequence that filled
the block. Then the draft model must compute the tokens of the block, and these count when the core decides whether a
prompt is worth its time. The rank has its own knowledge of its blocks (worker/drafted_kv.py), so an error here changes
no proposal.
"""

from __future__ import annotations

from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import DraftWork, StepPlan
from rayloom_engine.core.window import first_seen_block


class DraftedBlocks:
    """The blocks whose tokens the draft model has all computed, as far as results of steps have arrived."""

    def __init__(self, block_size: int, window: int | None) -> None:
        self._block_size = block_size
        self._window = window
        self.ids: set[int] = set()

    def ended(self, plan: StepPlan, work: DraftWork | None) -> None:
        """Records an ended plan.

        A block that the plan gives to a sequence for new tokens loses its old content. A block that it loads from host
        memory has KV of the target model alone.
        """
        self.ids.difference_update(block_id for _, block_id in plan.host_loads)
        start_of = {step.slot: step.start for step in plan.slots}
        for new in plan.new_slots:
            first = max(0, start_of[new.slot] // self._block_size - new.num_shared_blocks)
            self.ids.difference_update(new.block_table[first:])
        for step in plan.slots:
            self.ids.difference_update(step.new_block_ids)
        if work is not None:
            self.ids.update(work.whole_blocks)

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many known tokens of a running sequence the draft model must compute, with those not seen yet.

        As on the rank, all tokens from the first missing block on count, because the draft model computes them in
        order.
        """
        last = sequence.num_computed // self._block_size
        first = first_seen_block(sequence.num_computed, self._window, self._block_size)
        for index in range(first, last):
            if sequence.block_ids[index] not in self.ids:
                return sequence.num_tokens - index * self._block_size
        return sequence.num_tokens - last * self._block_size

    def forget(self) -> None:
        """Records that the ranks have lost all KV."""
        self.ids.clear()
