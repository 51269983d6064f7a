"""Runner: computes one rank's part of a StepPlan and returns a StepResult.

Each stage of a model sends its hidden states to the next stage. The first rank of the last stage chooses the tokens.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.core.probe import is_probe
from rayloom_engine.core.step import (
    BrokenAdapter,
    DraftWork,
    PromptLogprobs,
    Proposal,
    SampledToken,
    SlotStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from rayloom_engine.errors import CorruptRank, ModelError
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.stage_link import StageLink
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup
from rayloom_engine.worker.batch import InputBatch, build_batch
from rayloom_engine.worker.computation import RankComputation
from rayloom_engine.worker.draft_model import DraftModel
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.masks import Masks, StepMasks
from rayloom_engine.worker.slots import Slot, SlotTable
from rayloom_engine.worker.verification import accepted_rows, sampled_rows, sampled_slots
from rayloom_engine.worker.wanted_logprobs import with_tokens

logger = logging.getLogger(__name__)

# Rows of logits that are in memory at once for prompt logprobs. 64 rows of a 128k vocabulary in float32 are 32 MiB.
_LOGPROB_ROWS = 64

ArrayT = TypeVar("ArrayT")  # a torch tensor or a numpy array; only the computation reads its elements


@dataclass(slots=True)
class _Sampled:
    """The tokens that a step has sampled."""

    tokens: dict[int, SampledToken] = field(default_factory=dict)  # slot -> its last new token
    accepted: list[SampledToken] = field(default_factory=list)  # the new tokens of all slots, except those in `tokens`
    dirty: list[int] = field(default_factory=list)  # see StepResult.dirty_slots

    def ids(self, without: set[int]) -> dict[int, tuple[int, ...]]:
        """Returns the map: slot -> its new tokens. Leaves out the slots in `without`, and dirty slots."""
        found: dict[int, tuple[int, ...]] = {}
        for token in (*self.accepted, *self.tokens.values()):
            if token.slot not in without and token.slot not in self.dirty:
                found[token.slot] = (*found.get(token.slot, ()), token.token_id)
        return found


class Runner(Generic[ArrayT]):
    """Owns the slots of one rank, and runs its part of the model."""

    def __init__(
        self,
        computation: RankComputation[ArrayT],
        shape: ModelShape,
        part: ModelPart,
        epoch: int,
        link: StageLink[ArrayT] | None = None,
        group: TensorGroup[ArrayT] | None = None,
        forms: Forms | None = None,
    ) -> None:
        """`link`: to the neighbour stages; None if there is one stage. `forms`: only the rank that samples needs them.

        `group`: the connection to the other ranks of this stage; None if there are no others.
        """
        stage = part.stage
        shard = part.shard
        assert link is not None or stage.count == 1, f"stage {stage.index} needs a link to its neighbours"
        assert group is not None or shard.count == 1, f"shard {shard.index} needs a group of its stage"
        self.answers = stage.is_last and shard.is_first  # True on exactly one rank, which chooses the tokens
        self._computation = computation
        self.part = part
        self._vocab_size = shape.vocab_size
        self._link = link
        self._group: TensorGroup[ArrayT] = group or OneRank()
        self._slots = SlotTable(epoch, forms if self.answers else None)
        self._masks = Masks(self._slots.forms, shape.vocab_size)
        self._broken_adapters: dict[int, str] = {}  # adapter slot -> why its adapter could not be loaded
        # Proposes drafts. Only LoadedRank sets it, before the first step; other draft models need another Runner. None
        # after the draft model has failed: the ranks of the next epoch try it again.
        self.draft_model: DraftModel[Any] | None = None
        self.draft_failure: Exception | None = None  # the exception for which the draft model was dropped

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the plan's tokens. If this rank `answers`, chooses the next token of every slot that samples.

        The results of other ranks contain only times. Blocks until the previous stage has sent its hidden states and
        the other ranks of this stage have computed their parts. Raises RuntimeError if one of these ranks or the next
        stage is gone. Raises CorruptRank if this stage computes an infinite value or a NaN for a probe.
        """
        with self._computation.step():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        steps = self._slots.apply(plan)
        if self.draft_model is not None:
            with self._dropping_a_failed_draft_model():
                self.draft_model.apply(plan, self._slots.block_tables)
        self._masks.forget(plan.freed_slots)
        for load in plan.adapter_loads:
            self._load_adapter(load)
        if plan.host_stores:  # first, because their blocks may have new owners in this plan
            self._computation.store_blocks(plan.host_stores)
        if plan.cleared_blocks:
            self._computation.clear_blocks(plan.cleared_blocks)
        if plan.host_loads:
            self._computation.load_blocks(plan.host_loads)
        if plan.block_copies:
            self._computation.copy_blocks(plan.block_copies)
        started = time.perf_counter()
        batch = build_batch(steps, self._slots.block_tables, BLOCK_SIZE, has_adapters=self._slots.has_adapters)
        stage = self.part.stage
        received_TD: ArrayT | None = None
        if self._link is not None and not stage.is_first:
            waiting_since = time.perf_counter()
            received_TD = self._link.receive(plan.num_tokens)
            started += time.perf_counter() - waiting_since  # the wait does not count as this stage's time
        hidden_TD = self._computation.forward(batch, received_TD, self._group, _wanted_rows(batch))
        # Check before the hidden states are sent. Otherwise the next stage would exit instead of this damaged stage.
        self._check_probes(batch, hidden_TD)
        if self._link is not None and not stage.is_last:
            forward_s = time.perf_counter() - started
            self._link.send(hidden_TD)
            return StepResult(step_id=plan.step_id, epoch=plan.epoch, forward_s=forward_s)
        prompt_logprobs, corrupt = self._prompt_logprobs(batch, hidden_TD)
        sampling = [index for index, (step, _) in enumerate(batch.steps) if step.samples]
        sampled = _Sampled()
        masks = StepMasks()
        forward_end = time.perf_counter()
        if sampling:
            steps_N = [batch.steps[index] for index in sampling]
            rows = sampled_rows(steps_N, [batch.ends[index] for index in sampling])
            logits_NV = self._logits(self._rows_of(batch, hidden_TD, rows))
            forward_end = time.perf_counter()
            if logits_NV is not None:
                # Set the masks after the call that starts the head, because a GPU computes the logits meanwhile.
                masks = self._masks.set(steps_N, is_whole_step=len(sampling) == len(batch.steps))
                sampled = self._sample(logits_NV, steps_N, masks, corrupt)
        broken_adapters = self._with_broken_adapters(steps)
        corrupt.difference_update(*(broken.slots for broken in broken_adapters))
        without_token = corrupt | masks.postponed | masks.broken.keys()
        without_token.update(*(broken.slots for broken in broken_adapters))
        sample_end = time.perf_counter()
        proposals, draft_work = self._propose(batch, sampled, without_token)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            # An earlier position of the prompt may be corrupt although a token could be sampled at the last position.
            sampled=tuple(
                sampled.tokens[step.slot]
                for step in plan.slots
                if step.slot in sampled.tokens and step.slot not in without_token
            ),
            accepted=tuple(token for token in sampled.accepted if token.slot not in without_token),
            # A postponed slot keeps its blocks, so `dirty_slots` must name it, too.
            dirty_slots=tuple(slot for slot in sampled.dirty if slot not in without_token - masks.postponed),
            prompt_logprobs=tuple(prompt_logprobs),
            corrupt_slots=tuple(sorted(corrupt)),
            broken_adapters=broken_adapters,
            broken_forms=tuple(form for slot, form in sorted(masks.broken.items()) if slot not in corrupt),
            postponed_slots=tuple(sorted(masks.postponed - corrupt)),
            waiting_slots=self._masks.waiting_slots(),
            proposals=proposals,
            forward_s=forward_end - started,
            sample_s=sample_end - forward_end,
            waited_s=masks.waited_s,
            draft_work=draft_work,
        )

    def forget_all(self) -> None:
        """Empties every slot. No sequence refers to the content of the KV cache any more."""
        self._slots = SlotTable(self._slots.epoch, self._slots.forms)
        self._masks = Masks(self._slots.forms, self._vocab_size)
        if self.draft_model is not None:
            self.draft_model.forget_all()

    def _propose(
        self, batch: InputBatch, sampled: _Sampled, without_token: set[int]
    ) -> tuple[tuple[Proposal, ...], DraftWork | None]:
        """Returns the draft model's proposals and its work. Slots in `without_token` get no token in this step."""
        if self.draft_model is not None and any(step.num_proposals is not None for step, _ in batch.steps):
            with self._dropping_a_failed_draft_model():
                return self.draft_model.propose(batch.steps, sampled.ids(without_token), self._slots.block_tables)
        return (), None

    @contextlib.contextmanager
    def _dropping_a_failed_draft_model(self) -> Iterator[None]:
        """Logs an exception in the block, and drops the draft model."""
        try:
            yield
        except Exception as error:
            # Any exception, for example a full memory: no answer depends on the draft model, so its failure must not
            # end the rank. Its KV may be incomplete, so it is not tried again.
            logger.exception("the draft model has failed; answers continue without drafts until the ranks restart")
            self.draft_model = None
            self.draft_failure = error

    def _load_adapter(self, load: AdapterLoad) -> None:
        """Loads an adapter into its slot.

        If loading fails on the rank that answers, this rank reports the failure. On another rank, hidden states of
        tokens with the adapter become NaN, so the rank that answers finds the logits of these sequences corrupt.
        """
        self._broken_adapters.pop(load.slot, None)
        try:
            self._computation.load_adapter(load)
        except ModelError as error:
            logger.error("an adapter cannot be loaded: %s", error)
            self._broken_adapters[load.slot] = str(error)

    def _with_broken_adapters(self, steps: list[tuple[SlotStep, Slot]]) -> tuple[BrokenAdapter, ...]:
        """Returns the adapters that could not be loaded and that sequences of this step use."""
        return tuple(
            BrokenAdapter(number, tuple(step.slot for step, slot in steps if slot.adapter_slot == number), message)
            for number, message in self._broken_adapters.items()
            if any(slot.adapter_slot == number for _, slot in steps)
        )

    def _logits(self, hidden_ND: ArrayT) -> ArrayT | None:
        """Returns float32 logits [N, V] over the whole vocabulary; None unless this is the stage's first rank."""
        return self._group.gather(self._computation.logits(hidden_ND))

    def _sample(
        self, logits_NV: ArrayT, steps_N: list[tuple[SlotStep, Slot]], masks: StepMasks, corrupt: set[int]
    ) -> _Sampled:
        """Returns the next tokens of each slot. Adds slots whose logits are not finite to `corrupt`.

        Raises CorruptRank if one of these slots belongs to a probe.
        """
        sampled = _Sampled()
        token_ids, logprobs = self._choose(logits_NV, sampled_slots(steps_N, masks.after_drafts))
        end = 0
        for step, slot in steps_N:
            begin, end = end, end + 1 + len(step.draft_token_ids)
            masked = masks.after_drafts.get(step.slot)
            num_verified = None if masked is None else len(masked)
            found = accepted_rows(step.draft_token_ids, token_ids[begin:end], num_verified)
            if found.is_corrupt:
                if is_probe(slot.request_id):
                    raise CorruptRank("the head turned a probe into logits that are not finite (NaN or infinity)")
                corrupt.add(step.slot)
                slot.note_sampled(0)  # the id does not matter: results of later plans for the slot are dropped
                continue
            tokens = [
                SampledToken(step.slot, token_ids[row] or 0, logprobs[row])
                for row in range(begin, begin + found.num_tokens)
            ]
            for token in tokens:
                slot.note_sampled(token.token_id)
            if tokens:
                sampled.tokens[step.slot] = tokens[-1]
                sampled.accepted += tokens[:-1]
            if found.is_dirty:
                sampled.dirty.append(step.slot)
        return sampled

    def _choose(self, logits_NV: ArrayT, slots: list[Slot]) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Returns the next token id of each row (None if it is not finite), and logprobs of the rows that need them."""
        wanted = [row for row, slot in enumerate(slots) if slot.params.logprobs is not None]
        computation = self._computation
        # Logprobs are computed from a copy of the raw logits, because sampling may overwrite them.
        raw_NV = computation.rows(logits_NV, wanted) if wanted else logits_NV
        token_ids = computation.sample(logits_NV, slots)
        entries: list[TokenLogprobs | None] = [None] * len(slots)
        if wanted:
            chosen = [token_ids[row] or 0 for row in wanted]  # 0 for a row without a token: its logprobs are not used
            found = computation.describe(raw_NV, chosen, [slots[row].params.logprobs or 0 for row in wanted])
            for number, (row, entry) in enumerate(zip(wanted, found, strict=True)):
                if asked := slots[row].params.logprob_token_ids:
                    logits = computation.values(raw_NV, number, (entry.token_id, *asked))
                    entry = with_tokens(entry, asked, logits)
                entries[row] = entry
        return token_ids, entries

    def _prompt_logprobs(self, batch: InputBatch, hidden_TD: ArrayT) -> tuple[list[PromptLogprobs], set[int]]:
        """Returns logprobs of the prompt tokens after the positions of this step, for slots that want them.

        Also returns the slots whose logits are not finite. These get no logprobs.
        """
        parts = []
        corrupt: set[int] = set()
        for (step, slot), end in zip(batch.steps, batch.ends, strict=True):
            num_top = slot.params.prompt_logprobs
            # Position p predicts token p + 1; the prompt's last position predicts the first generated token.
            last = min(step.start + step.num_tokens, slot.num_prompt_tokens - 1)
            if num_top is None or step.start >= last:
                continue
            begin = end - step.num_tokens
            entries: list[TokenLogprobs] = []
            for first in range(step.start, last, _LOGPROB_ROWS):
                stop = min(first + _LOGPROB_ROWS, last)
                offset = begin - step.start
                logits_NV = self._logits(self._computation.span(hidden_TD, offset + first, offset + stop))
                if logits_NV is not None and not self._computation.have_tokens(logits_NV):
                    corrupt.add(step.slot)
                elif logits_NV is not None:
                    following = slot.token_ids[first + 1 : stop + 1].tolist()
                    entries += self._computation.describe(logits_NV, following, [num_top] * len(following))
            if self.answers and step.slot not in corrupt:
                parts.append(PromptLogprobs(step.slot, step.start + 1, tuple(entries)))
        return parts, corrupt

    def _rows_of(self, batch: InputBatch, hidden_TD: ArrayT, rows: Sequence[int]) -> ArrayT:
        """Returns hidden states [N, D] of ascending rows. If these are all rows, nothing is copied."""
        return hidden_TD if len(rows) == batch.ends[-1] else self._computation.rows(hidden_TD, rows)

    def _check_probes(self, batch: InputBatch, hidden_TD: ArrayT) -> None:
        """Raises CorruptRank if the hidden states of a probe are not finite."""
        rows = [end - 1 for (_, slot), end in zip(batch.steps, batch.ends, strict=True) if is_probe(slot.request_id)]
        if rows and not self._computation.are_finite(self._computation.rows(hidden_TD, rows)):
            raise CorruptRank(
                f"stage {self.part.stage.index} turned a probe into hidden states that are not finite (NaN or infinity)"
            )


def _wanted_rows(batch: InputBatch) -> list[int] | None:
    """Returns the rows of the hidden states that the sampler or a probe reads; None if all are read.

    For each slot that samples or belongs to a probe, these are the rows of its last token and of its draft.
    """
    if any(slot.params.prompt_logprobs is not None for _, slot in batch.steps):
        return None
    wanted = [
        (pair, end)
        for pair, end in zip(batch.steps, batch.ends, strict=True)
        if pair[0].samples or is_probe(pair[1].request_id)
    ]
    return sampled_rows([pair for pair, _ in wanted], [end for _, end in wanted])
