"""SlotTable: the state that a rank keeps between steps, for each running sequence. Only StepPlans change it."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.worker.bad_word_index import BadWordIndex
from rayloom_engine.worker.block_tables import BlockTables
from rayloom_engine.worker.forms import Form, Forms
from rayloom_engine.worker.thinking import Thinking


class Slot:
    """A sequence on a rank. Only `token_ids[:num_tokens]` is valid. `SlotTable.block_tables` has its KV blocks."""

    __slots__ = (
        "adapter_slot",
        "allowed",
        "eos_token_ids",
        "form",
        "has_embeds",
        "newest",
        "num_postponed",
        "num_prompt_tokens",
        "num_tokens",
        "other_ids",
        "params",
        "request_id",
        "sampled_ids",
        "thinking",
        "token_ids",
        "_bad_words",
        "_completed",
        "__weakref__",  # the table of token counts must not keep a slot alive
    )

    def __init__(self, new: NewSlot, known: Slot | None = None, forms: Forms | None = None) -> None:
        """`known`: the slot that `new.prompt_of` names. `forms`: None on a rank that does not sample."""
        self.request_id = new.request_id
        self.adapter_slot = new.adapter_slot
        self.params: DecodingParams = new.params
        if new.has_grammar_of_prompt:
            assert known is not None
            self.params = msgspec.structs.replace(new.params, grammar=known.params.grammar)
        self.form: Form | None = None
        self.thinking: Thinking | None = None
        self.other_ids: npt.NDArray[np.int64] | None = None  # see bans.py
        self.allowed: Mask | None = None  # tokens that form and thinking allow next, set before sampling; None: all
        self.num_postponed = 0  # number of steps in which the slot was postponed (masks.py), since its last mask
        self._bad_words: BadWordIndex | None = None  # built at the first use, on the rank that samples
        self._completed: tuple[int, ...] | None = None  # ids that would complete a bad word; None: not computed
        self.eos_token_ids = new.eos_token_ids
        self.sampled_ids: list[int] = []  # ids that this rank has sampled and that no plan has sent yet, oldest first
        self.num_prompt_tokens = new.num_prompt_tokens
        self.has_embeds = new.has_embeds
        num_known_tokens = 0 if known is None else new.num_prompt_tokens
        self.num_tokens = num_known_tokens + len(new.token_ids)
        self.token_ids: npt.NDArray[np.int64] = np.zeros(max(64, 2 * self.num_tokens), dtype=np.int64)
        self.token_ids[num_known_tokens : self.num_tokens] = new.token_ids
        if known is not None:
            assert num_known_tokens <= known.num_tokens, f"slot of {known.request_id} knows fewer tokens than it shares"
            self.token_ids[:num_known_tokens] = known.token_ids[:num_known_tokens]
        self.newest = int(self.token_ids[self.num_tokens - 1])  # the last token id, as a Python int
        if self.params.grammar and forms is not None:
            self.form = forms.begin(self.params)
            self.form.append(self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist())
        if self.params.thinking is not None and forms is not None:
            self.thinking = Thinking(self.params.thinking, forms.token_bytes)
            self.thinking.append(self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist())

    def write_draft(self, token_ids: tuple[int, ...]) -> None:
        """Writes a draft behind the valid token ids, where the batch of the step reads it."""
        end = self.num_tokens + len(token_ids)
        self._make_room(end)
        self.token_ids[self.num_tokens : end] = token_ids

    def after_draft(self, num: int) -> Slot:
        """Returns the slot as the sampler would see it if the draft's first `num` tokens were tokens of the slot.

        The result is valid in this step, and has no mask. Both slots share the array of token ids.
        """
        ahead = object.__new__(Slot)
        ahead.request_id = self.request_id
        ahead.params = self.params
        ahead.form = ahead.thinking = ahead.allowed = None
        ahead.other_ids = self.other_ids
        ahead.num_postponed = 0
        ahead._bad_words = self._bad_words
        ahead._completed = None
        ahead.eos_token_ids = self.eos_token_ids
        ahead.sampled_ids = []
        ahead.num_prompt_tokens = self.num_prompt_tokens
        ahead.has_embeds = self.has_embeds
        ahead.num_tokens = self.num_tokens + num
        ahead.token_ids = self.token_ids
        ahead.newest = int(self.token_ids[ahead.num_tokens - 1])
        return ahead

    def _make_room(self, num_tokens: int) -> None:
        while num_tokens > len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that cannot be chosen next, because of min_tokens or because they would complete a bad word."""
        words = self._completed_words()
        if self.num_generated >= self.params.min_tokens:
            return words
        return (*self.eos_token_ids, *self.params.stop_token_ids, *words)

    def _completed_words(self) -> tuple[int, ...]:
        """Returns the last tokens of bad words that the next token would complete. Computed once for each new token."""
        if not self.params.bad_words:
            return ()
        if self._bad_words is None:
            self._bad_words = BadWordIndex(self.params.bad_words)
        if self._completed is None:
            self._completed = self._bad_words.completed(self.token_ids[self.num_prompt_tokens : self.num_tokens])
        return self._completed

    @property
    def num_unknown(self) -> int:
        """Number of leading entries of `token_ids` that are placeholders of embeddings; penalties must skip them."""
        return self.num_prompt_tokens if self.has_embeds else 0

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def note_sampled(self, token_id: int) -> None:
        """Stores an id that this rank has sampled, in case a later plan has a placeholder for it."""
        if not self.params.has_mask:  # plans have no placeholders for a slot with masks, whose samples may be dropped
            self.sampled_ids.append(token_id)

    def append_sampled(self, num: int) -> None:
        """Appends the oldest `num` ids that this rank has sampled and that no plan has sent."""
        assert len(self.sampled_ids) >= num, f"{num} placeholders, but {len(self.sampled_ids)} sampled ids"
        self.append_tokens(tuple(self.sampled_ids[:num]))

    def append_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Appends at least one token id. Drops the same number of the oldest `sampled_ids`."""
        del self.sampled_ids[: len(token_ids)]
        end = self.num_tokens + len(token_ids)
        if self.form is not None:
            self.form.append(token_ids)
        if self.thinking is not None:
            self.thinking.append(token_ids)
        self._make_room(end)
        self.newest = token_ids[-1]
        if len(token_ids) == 1:
            self.token_ids[self.num_tokens] = self.newest  # four times as fast as a slice
        else:
            self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end
        self._completed = None


class SlotTable:
    """Slot number -> Slot. `apply` applies a plan's changes to slots; the runner executes the rest of the plan."""

    def __init__(self, epoch: int, forms: Forms | None = None) -> None:
        """`forms`: the grammars of sequences, on the rank that samples."""
        self.epoch = epoch
        self.forms = forms
        self.block_tables = BlockTables()
        self._slots: dict[int, Slot] = {}
        self._with_adapter: set[int] = set()

    @property
    def has_adapters(self) -> bool:
        """True if a slot has an adapter."""
        return bool(self._with_adapter)

    def apply(self, plan: StepPlan) -> list[tuple[SlotStep, Slot]]:
        """Applies the plan and returns the slots that compute in this step, in plan order.

        Raises AssertionError for a plan of another epoch.
        """
        assert plan.epoch == self.epoch, f"plan of epoch {plan.epoch} on a rank of epoch {self.epoch}"
        for number in plan.freed_slots:
            del self._slots[number]
            self._with_adapter.discard(number)
        for new in plan.new_slots:
            assert new.slot not in self._slots, f"slot {new.slot} is taken"
            self._add(new)
        steps = []
        for step in plan.slots:
            slot = self._slots[step.slot]
            if step.new_token_ids:
                slot.append_tokens(step.new_token_ids)
            if step.num_placeholders:
                slot.append_sampled(step.num_placeholders)
            if step.draft_token_ids:
                slot.write_draft(step.draft_token_ids)
            if step.new_block_ids:
                self.block_tables.append(step.slot, step.new_block_ids)
            steps.append((step, slot))
        return steps

    def _add(self, new: NewSlot) -> None:
        if new.adapter_slot >= 0:
            self._with_adapter.add(new.slot)
        if new.prompt_of is None:
            self._slots[new.slot] = Slot(new, forms=self.forms)
            self.block_tables.begin(new.slot, new.block_table)
            return
        known = self._slots[new.prompt_of]
        num_known_blocks = len(self.block_tables.of(new.prompt_of))
        assert new.num_shared_blocks <= num_known_blocks, f"slot of {known.request_id} has fewer blocks than it shares"
        self._slots[new.slot] = Slot(new, known, self.forms)
        self.block_tables.begin(new.slot, new.block_table, new.prompt_of, new.num_shared_blocks)
