"""SlotTable: what a rank remembers of each running sequence between steps. Only StepPlans change it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan


class Slot:
    """A sequence on a rank. `token_ids[:num_tokens]` and `block_table[:num_blocks]` are valid."""

    __slots__ = (
        "block_table",
        "eos_token_ids",
        "num_blocks",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "request_id",
        "token_ids",
    )

    def __init__(self, new: NewSlot, known: Slot | None = None) -> None:
        """`known`: the slot that `new.prompt_of` names."""
        self.request_id = new.request_id
        self.params: DecodingParams = new.params
        self.eos_token_ids = new.eos_token_ids
        self.num_prompt_tokens = new.num_prompt_tokens
        num_known_tokens = 0 if known is None else new.num_prompt_tokens
        self.num_tokens = num_known_tokens + len(new.token_ids)
        self.token_ids: npt.NDArray[np.int64] = np.zeros(max(64, 2 * self.num_tokens), dtype=np.int64)
        self.token_ids[num_known_tokens : self.num_tokens] = new.token_ids
        num_known_blocks = new.num_shared_blocks
        self.num_blocks = num_known_blocks + len(new.block_table)
        self.block_table: npt.NDArray[np.int64] = np.zeros(max(8, 2 * self.num_blocks), dtype=np.int64)
        self.block_table[num_known_blocks : self.num_blocks] = new.block_table
        if known is not None:
            assert num_known_tokens <= known.num_tokens, f"slot of {known.request_id} knows fewer tokens than it shares"
            assert num_known_blocks <= known.num_blocks, f"slot of {known.request_id} has fewer blocks than it shares"
            self.token_ids[:num_known_tokens] = known.token_ids[:num_known_tokens]
            self.block_table[:num_known_blocks] = known.block_table[:num_known_blocks]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append_tokens(self, token_ids: tuple[int, ...]) -> None:
        end = self.num_tokens + len(token_ids)
        while end > len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def append_blocks(self, block_ids: tuple[int, ...]) -> None:
        end = self.num_blocks + len(block_ids)
        while end > len(self.block_table):
            self.block_table = np.concatenate([self.block_table, np.zeros_like(self.block_table)])
        self.block_table[self.num_blocks : end] = block_ids
        self.num_blocks = end


class SlotTable:
    """Slot number -> Slot. `apply` applies a plan's changes to slots; the runner executes the rest of the plan."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._slots: dict[int, Slot] = {}

    def apply(self, plan: StepPlan) -> list[tuple[SlotStep, Slot]]:
        """Applies the plan and returns the slots that compute in this step, in plan order.

        Raises AssertionError for a plan of another epoch.
        """
        assert plan.epoch == self.epoch, f"plan of epoch {plan.epoch} on a rank of epoch {self.epoch}"
        for number in plan.freed_slots:
            del self._slots[number]
        for new in plan.new_slots:
            assert new.slot not in self._slots, f"slot {new.slot} is taken"
            self._slots[new.slot] = Slot(new, None if new.prompt_of is None else self._slots[new.prompt_of])
        steps = []
        for step in plan.slots:
            slot = self._slots[step.slot]
            if step.new_token_ids:
                slot.append_tokens(step.new_token_ids)
            if step.new_block_ids:
                slot.append_blocks(step.new_block_ids)
            steps.append((step, slot))
        return steps
