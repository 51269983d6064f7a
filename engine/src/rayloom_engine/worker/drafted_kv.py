"""DraftedKv: the knowledge of which tokens of each slot, and of each block, have KV of the draft model.

A block of the prefix cache may have KV of the target model alone, because the draft model has left out the sequence
that filled the block. So the draft model computes a new slot from the first block on that it has not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.step import StepPlan
from rayloom_engine.core.window import first_seen_block
from rayloom_engine.worker.block_tables import BlockTables

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class Drafted:
    """The KV that the draft model has computed for a slot."""

    num_computed: int  # leading tokens of the slot with KV, or those that no later token sees
    ahead: tuple[int, ...] = ()  # proposed tokens after these, whose KV is computed; they may be wrong
    is_broken: bool = False  # True: the slot gets no more proposals


class DraftedKv:
    """Only the draft model's passes and the changes of blocks in plans change this knowledge."""

    def __init__(self, num_blocks: int, window: int | None) -> None:
        """`window`: positions that a token of the target model sees; earlier blocks may belong to other sequences."""
        self._window = window
        self._slots: dict[int, Drafted] = {}
        # True for a block whose tokens are all computed. Only blocks of the prefix index need this.
        self.is_whole: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._completed: list[int] = []  # blocks that have become whole since the last call of `take_completed`

    def of(self, slot: int) -> Drafted:
        return self._slots[slot]

    def apply(self, plan: StepPlan, tables: BlockTables) -> None:
        """Records the slots and the blocks of a plan that the SlotTable has applied."""
        for number in plan.freed_slots:
            self._slots.pop(number, None)
        for _, block_id in plan.host_loads:  # copies in host memory have KV of the target model alone
            self.is_whole[block_id] = False
        starts = {step.slot: step.start for step in plan.slots}
        for new in plan.new_slots:
            start = starts[new.slot]
            table = tables.of(new.slot)
            self.is_whole[table[start // BLOCK_SIZE :]] = False
            self._slots[new.slot] = Drafted(self._first_missing(table, start))
        for step in plan.slots:
            if step.new_block_ids:
                self.is_whole[list(step.new_block_ids)] = False

    def follow(self, slot: int, token_ids: IntArray, start: int, end: int, table: IntArray) -> None:
        """Counts earlier proposed tokens that are tokens of the slot now, and leaves out positions that no token sees.

        `token_ids`: the slot's tokens, with those that the step has sampled. `start`: the step's first position. `end`:
        the end of the tokens that the draft model shall have computed; the last of them is computed in any case,
        because the next token is sampled from it. `table`: the block table of the slot.
        """
        drafted = self._slots[slot]
        first_seen = BLOCK_SIZE * first_seen_block(start, self._window, BLOCK_SIZE)
        if drafted.num_computed < first_seen:
            # The blocks before `first_seen` may belong to other slots, so nothing is recorded for them.
            drafted.num_computed = first_seen
            drafted.ahead = ()
        first = drafted.num_computed
        most = min(len(drafted.ahead), end - first - 1)
        num = 0
        while num < most and token_ids[first + num] == drafted.ahead[num]:
            num += 1
        self.computed(slot, first + num, table)

    def computed(self, slot: int, end: int, table: IntArray) -> None:
        """Records that the KV of the slot's tokens before `end` is computed."""
        drafted = self._slots[slot]
        blocks = table[drafted.num_computed // BLOCK_SIZE : end // BLOCK_SIZE]
        self.is_whole[blocks] = True
        self._completed += blocks.tolist()
        drafted.num_computed = end
        drafted.ahead = ()

    def spoiled(self, slot: int, start: int, table: IntArray) -> tuple[int, ...]:
        """Records that the slot's KV is not finite. Returns the blocks that must be cleared.

        Masked attention multiplies the KV of later positions by zero, and zero times NaN is NaN. So without clearing, a
        later owner of a block would lose its proposals. Proposals are worse where another slot shares one of the
        blocks.
        """
        self._slots[slot].is_broken = True
        blocks = table[first_seen_block(start, self._window, BLOCK_SIZE) :]
        self.is_whole[blocks] = False
        return tuple(blocks.tolist())

    def take_completed(self) -> tuple[int, ...]:
        """Returns the blocks that have become whole since the last call, and still are."""
        found = tuple(block for block in self._completed if self.is_whole[block])
        self._completed = []
        return found

    def forget_slots(self) -> None:
        """Forgets all slots. From now on, every block gets a new owner before a slot shares it."""
        self._slots = {}

    def _first_missing(self, table: IntArray, start: int) -> int:
        """Returns the first position, of those before `start` that later tokens see, whose KV may be missing."""
        first = first_seen_block(start, self._window, BLOCK_SIZE)
        last = start // BLOCK_SIZE
        missing = np.flatnonzero(~self.is_whole[table[first:last]])
        return BLOCK_SIZE * (first + int(missing[0]) if len(missing) else last)
