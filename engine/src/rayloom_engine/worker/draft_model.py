"""DraftModel: a small model with which the rank that samples proposes the next tokens of its slots.

The model has a KV cache of its own, with the blocks and the block tables of the target model. So forks, preemption and
prefix hits need no block tables of their own. The draft model may lag behind the target model: it computes a slot only
if the plan asks for it. For each block it remembers whether it has computed all tokens of the block (drafted_kv.py). So
after a prefix hit, it computes the tokens of blocks that it has left out, and of the last, partial block.

A proposed token is the token that the sampler picks from the draft model's logits, with the noise of the token's
position. So a sampled token is guessed as well as a greedy one. No proposal changes a token: the target model verifies
it. Proposals ignore the masks of grammars; the core cuts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.step import DraftWork, Proposal, SlotStep, StepPlan
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup
from rayloom_engine.worker.batch import InputBatch, build_batch
from rayloom_engine.worker.block_tables import BlockTables
from rayloom_engine.worker.computation import RankComputation
from rayloom_engine.worker.drafted_kv import Drafted, DraftedKv
from rayloom_engine.worker.slots import Slot

ArrayT = TypeVar("ArrayT")

# A step computes at most this many tokens with the draft model, or as many as with the target model if these are more.
# So a sequence that has lagged behind delays no step by much.
_LEAST_TOKENS = 64
# A slot that does not lag behind lacks at most the KV of this many tokens: its newest token, and the last token of an
# accepted proposal.
_MOST_NEWEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """The limits of a draft model."""

    max_positions: int  # longest sequence that the draft model can compute
    max_tokens: int  # most tokens in one step
    window: int | None  # positions that a token of the target model sees; earlier blocks may belong to other sequences
    num_ids: int  # both models have the token ids below this number


@dataclass(slots=True, eq=False)
class _Work:
    """The work for one slot in a step."""

    step: SlotStep
    slot: Slot
    drafted: Drafted
    new_ids: tuple[int, ...]  # tokens that the step has sampled
    end: int  # the draft model computes the positions from `drafted.num_computed` to `end`
    num_proposals: int
    proposed: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.end - self.drafted.num_computed

    @property
    def is_complete(self) -> bool:
        return len(self.proposed) >= self.num_proposals or self.drafted.is_broken

    def after_proposals(self) -> Slot:
        """Returns the slot as the sampler would see it after the sampled and the proposed tokens."""
        self.slot.write_draft((*self.new_ids, *self.proposed))
        return self.slot.after_draft(len(self.new_ids) + len(self.proposed))


class DraftModel(Generic[ArrayT]):
    """Owns the draft model's KV cache, and the knowledge of which KV in it is computed."""

    def __init__(
        self,
        computation: RankComputation[ArrayT],
        limits: DraftLimits,
        group: TensorGroup[ArrayT] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`computation`: the whole draft model, with as many blocks and token ids as the target model.

        `group`: of one rank.
        """
        self._computation = computation
        self._limits = limits
        self._group: TensorGroup[ArrayT] = group or OneRank()
        self._clock = clock
        self.kv = DraftedKv(computation.num_blocks, limits.window)

    def apply(self, plan: StepPlan, tables: BlockTables) -> None:
        """Records the slots and the blocks of a plan that the SlotTable has applied."""
        if plan.cleared_blocks:
            with self._computation.step():
                self._computation.clear_blocks(plan.cleared_blocks)
        self.kv.apply(plan, tables)

    def propose(
        self, steps: Sequence[tuple[SlotStep, Slot]], sampled: Mapping[int, tuple[int, ...]], tables: BlockTables
    ) -> tuple[tuple[Proposal, ...], DraftWork]:
        """Computes the draft model's part of a step. `sampled`: slot number -> tokens that the step has sampled."""
        started = self._clock()
        with self._computation.step():
            wanted = self._wanted(steps, sampled, tables)
            asking = [item.step.slot for item in wanted if item.num_proposals]
            work = self._within_limit(wanted, sum(step.num_tokens for step, _ in steps))
            num_tokens = sum(item.num_missing for item in work)
            served = {item.step.slot for item in work if item.num_proposals}
            catches_up = not served or any(item.num_missing > _MOST_NEWEST for item in work)
            if work:
                self._first_pass(work, tables)
            first_end = self._clock()
            num_passes = int(bool(work) and not catches_up)
            while proposing := [item for item in work if not item.is_complete]:
                self._next_pass(proposing, tables)
                num_passes += 1
        first_s, later_s = first_end - started, self._clock() - first_end
        return (
            tuple(Proposal(item.step.slot, tuple(item.proposed)) for item in work if item.proposed),
            DraftWork(
                proposal_s=later_s + (0.0 if catches_up else first_s),
                num_passes=num_passes,
                num_served=len(served) if num_passes else 0,
                catch_up_s=first_s if catches_up else 0.0,
                num_catch_up_tokens=num_tokens if catches_up else 0,
                lagging_slots=tuple(slot for slot in asking if slot not in served),
                whole_blocks=self.kv.take_completed(),
            ),
        )

    def forget_all(self) -> None:
        """Forgets all slots."""
        self.kv.forget_slots()

    def _wanted(
        self, steps: Sequence[tuple[SlotStep, Slot]], sampled: Mapping[int, tuple[int, ...]], tables: BlockTables
    ) -> list[_Work]:
        """Returns the work that the plan asks for, with the tokens that the draft model has left out before."""
        wanted = []
        for step, slot in steps:
            drafted = self.kv.of(step.slot)
            new_ids = sampled.get(step.slot, ())
            if step.num_proposals is None or drafted.is_broken or (step.samples and not new_ids):
                continue
            num_known = slot.num_tokens + len(new_ids)
            table = tables.of(step.slot)
            room = min(self._limits.max_positions, BLOCK_SIZE * len(table))
            end = num_known if step.num_proposals else min(step.start + step.num_tokens, slot.num_tokens)
            if num_known > self._limits.max_positions or end > room:
                continue
            slot.write_draft(new_ids)
            self.kv.follow(step.slot, slot.token_ids, step.start, end, table)
            missing_ids = slot.token_ids[drafted.num_computed : end]
            if len(missing_ids) and int(missing_ids.max()) >= self._limits.num_ids:
                drafted.is_broken = True  # the draft model has no embedding for one of the tokens
                continue
            num_proposals = min(step.num_proposals, room - end + 1)  # the KV of the last proposed token is not computed
            wanted.append(_Work(step, slot, drafted, new_ids, end, num_proposals))
        return wanted

    def _within_limit(self, wanted: list[_Work], num_step_tokens: int) -> list[_Work]:
        """Returns the work of this step, cut to a number of tokens. `num_step_tokens`: tokens of the target model.

        Slots that lack the fewest tokens come first. So a slot that lags behind far takes no proposals from others. A
        slot that has not caught up gets no proposal.
        """
        left = min(max(_LEAST_TOKENS, num_step_tokens), self._limits.max_tokens)
        work = []
        for item in sorted(wanted, key=lambda item: item.num_missing):
            num = min(left, item.num_missing)
            if num <= 0:
                continue
            left -= num
            if num < item.num_missing:
                item.end = item.drafted.num_computed + num
                item.num_proposals = 0
            work.append(item)
        return work

    def _first_pass(self, work: list[_Work], tables: BlockTables) -> None:
        """Computes all tokens that are missing, and proposes the first token of each proposal."""
        pairs = []
        for item in work:
            step = SlotStep(slot=item.step.slot, start=item.drafted.num_computed, num_tokens=item.num_missing)
            pairs.append((step, item.slot.after_draft(item.end - item.slot.num_tokens)))
        broken = self._compute(work, pairs, tables)
        for item in work:
            if item not in broken:
                self.kv.computed(item.step.slot, item.end, tables.of(item.step.slot))
        # Afterwards, because a broken slot may share blocks that another slot has counted as computed just now.
        self._break(broken, tables)

    def _next_pass(self, work: list[_Work], tables: BlockTables) -> None:
        """Computes the newest proposed token of each slot, and proposes the next token."""
        pairs = []
        for item in work:
            newest = item.end + len(item.proposed) - 1
            step = SlotStep(slot=item.step.slot, start=newest, num_tokens=1)
            pairs.append((step, item.after_proposals()))
            item.drafted.ahead = tuple(item.proposed)
        self._break(self._compute(work, pairs, tables), tables)

    def _compute(self, work: list[_Work], pairs: list[tuple[SlotStep, Slot]], tables: BlockTables) -> list[_Work]:
        """Runs the draft model, and appends a token to each proposal of `work` that is not complete.

        Returns the items whose last row is not finite. Without these rows, an accelerator would not have to finish
        before the time of the pass is read.
        """
        batch = build_batch(pairs, tables, BLOCK_SIZE)
        items = {item.step.slot: item for item in work}
        ordered = [items[step.slot] for step, _ in batch.steps]
        hidden_ND = self._last_rows(batch)
        num = len(ordered)
        asking = [row for row in range(num) if ordered[row].num_proposals]
        others = [row for row in range(num) if not ordered[row].num_proposals]
        computation = self._computation
        broken = []
        if others and not computation.are_finite(computation.rows(hidden_ND, others)):
            broken = [ordered[row] for row in others if not computation.are_finite(computation.rows(hidden_ND, [row]))]
        if not asking:
            return broken
        asking_ND = computation.rows(hidden_ND, asking) if others else hidden_ND
        token_ids = computation.sample(computation.logits(asking_ND), [batch.steps[row][1] for row in asking])
        for row, token_id in zip(asking, token_ids, strict=True):
            item = ordered[row]
            if token_id is None:
                broken.append(item)
            elif token_id < self._limits.num_ids:
                item.proposed.append(token_id)
            else:
                item.num_proposals = len(item.proposed)  # no token that both models have may follow
        return broken

    def _last_rows(self, batch: InputBatch) -> ArrayT:
        """Computes the batch. Returns the hidden state of the last token of each of its sequences."""
        rows = [end - 1 for end in batch.ends]
        hidden_TD = self._computation.forward(batch, None, self._group, rows)
        return hidden_TD if len(rows) == batch.ends[-1] else self._computation.rows(hidden_TD, rows)

    def _break(self, broken: list[_Work], tables: BlockTables) -> None:
        """Ends the proposals for slots whose logits are not finite, and clears their blocks."""
        for item in broken:
            slot = item.step.slot
            self._computation.clear_blocks(self.kv.spoiled(slot, item.step.start, tables.of(slot)))
