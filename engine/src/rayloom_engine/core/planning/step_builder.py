"""StepBuilder: collects the sequences of a step and their numbers of tokens, and makes the StepPlan for the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.core.host_tier import NO_HOST_ORDERS, HostOrders
from rayloom_engine.core.planning.prompt_time import PromptTime
from rayloom_engine.core.sequence import KnownPrompt, Sequence
from rayloom_engine.core.step import SlotStep, StepPlan

# Smallest token budget of a plan when several plans are in flight. A stage needs almost as long for fewer tokens,
# because it reads all of its weights in every step.
_LEAST_SHARE = 64


@dataclass(slots=True)
class StepBuilder:
    budget: int  # number of tokens that may still be added to the step
    max_decodes: int  # limit of sequences that decode (compute one token) in this step
    share: int | None = None  # limit of prompt tokens of one tenant; None = no limit
    prompt_time: PromptTime | None = None  # limits the prompt tokens of all tenants; None = no limit
    # True if a prompt that could end in this step shall end in the next step (backlog.py)
    leaves_last_tokens: bool = False
    most_embeds_bytes: int | None = None  # limit of the bytes of embeddings in the step; None = no limit
    num_kept_blocks: int = 0  # free blocks that admitted sequences may not use, because running prompts need them
    num_tokens: dict[Sequence, int] = field(default_factory=dict)  # scheduled sequence -> tokens to compute
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # sequence -> (from, to) block ids
    adapter_loads: tuple[AdapterLoad, ...] = ()  # adapters that the ranks load before the step
    host_orders: HostOrders = NO_HOST_ORDERS  # stores and loads of KV blocks
    # sequence -> its draft; `num_tokens` counts the draft's tokens, too
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    proposals: dict[Sequence, int] = field(default_factory=dict)  # sequence -> SlotStep.num_proposals
    # True if blocks ran out: a running sequence was preempted or must wait, so no sequence is admitted
    is_short: bool = False
    _prompt_tokens: dict[str, int] = field(default_factory=dict)  # tenant -> tokens counted against its share
    _embeds_bytes: int = 0  # bytes of embeddings in the step, counted if there is a limit
    _chunks: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)  # (start, tokens) of each chunk

    @property
    def has_prompts(self) -> bool:
        """True if the step computes tokens of a prompt."""
        return bool(self._chunks)

    def computes_prompt_of(self, sequence: Sequence) -> bool:
        """True if the step computes tokens of a prompt for this sequence."""
        return sequence in self._chunks

    @property
    def is_full(self) -> bool:
        """True if no further token of a prompt may be added."""
        return self.budget == 0 or (self.prompt_time is not None and self.prompt_time.most(0) == 0)

    def room_for(self, tenant: str) -> int:
        """Returns how many prompt tokens of this tenant may still be added to the step."""
        if self.share is None:
            return self.budget
        return max(0, min(self.budget, self.share - self._prompt_tokens.get(tenant, 0)))

    def most_with_embeds(self, sequence: Sequence, start: int, num: int) -> int:
        """Returns how many of the `num` tokens from position `start` on may be added, by the limit of embeddings.

        One position may be added to a step without embeddings, however long its row is.
        """
        embeds = sequence.embeds
        if self.most_embeds_bytes is None or embeds is None:
            return num
        most = max(0, self.most_embeds_bytes - self._embeds_bytes) // embeds.row_bytes
        if not self._embeds_bytes:
            most = max(1, most)
        return num if sequence.num_prompt_tokens - start <= most else min(num, most)

    def take(self, sequence: Sequence, num: int, *, is_prompt: bool) -> None:
        """Adds `num` tokens of the sequence to the step."""
        num_before = self.num_tokens.get(sequence, 0)
        if self.most_embeds_bytes is not None:
            self._embeds_bytes += _embeds_bytes(sequence, num_before, num)
        self.num_tokens[sequence] = num_before + num
        self.budget -= num
        if is_prompt:
            start = sequence.num_computed + num_before
            self._prompt_tokens[sequence.tenant] = self._prompt_tokens.get(sequence.tenant, 0) + num
            self._chunks.setdefault(sequence, []).append((start, num))
            if self.prompt_time is not None:
                self.prompt_time.spend(start, num)

    def add_draft(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Adds a draft to a sequence whose newest token is in the step."""
        self.drafts[sequence] = draft
        self.take(sequence, len(draft), is_prompt=False)

    def drop(self, sequence: Sequence) -> None:
        """Removes the sequence from the step. Its tokens no longer count in the budget and in the limits of prompts."""
        num_tokens = self.num_tokens.pop(sequence, 0)
        self.budget += num_tokens
        if self.most_embeds_bytes is not None:
            self._embeds_bytes -= _embeds_bytes(sequence, 0, num_tokens)
        self.copies.pop(sequence, None)
        self.drafts.pop(sequence, None)
        for start, num in self._chunks.pop(sequence, ()):
            self._prompt_tokens[sequence.tenant] -= num
            if self.prompt_time is not None:
                self.prompt_time.give_back(start, num)

    def to_plan(
        self,
        step_id: int,
        epoch: int,
        freed_slots: tuple[int, ...],
        cleared_blocks: tuple[int, ...],
        running: Iterable[Sequence],
    ) -> StepPlan:
        """Returns the plan.

        Marks its tokens as computed, and its token ids and blocks as sent to the ranks. `running`: all sequences that
        have a slot.
        """
        new_slots = []
        slots = []
        # id(prompt) -> a sequence with this prompt that has a slot on the ranks, and the number of its blocks that the
        # ranks know when they add this plan's new slots. Blocks that this plan appends to older slots do not count,
        # because the ranks add new slots first.
        known: dict[int, KnownPrompt] = {}
        if any(sequence.num_sent_blocks == 0 for sequence in self.num_tokens):
            known = {
                id(sequence.prompt_ids): KnownPrompt(sequence, sequence.num_sent_blocks)
                for sequence in running
                if sequence.num_sent_blocks
            }
        for place, (sequence, num) in enumerate(self.num_tokens.items()):
            assert sequence.slot is not None
            sequence.last_turn = (step_id, place)
            new_token_ids: tuple[int, ...] = ()
            new_block_ids: tuple[int, ...] = ()
            if sequence.num_sent_blocks == 0:
                new_slots.append(sequence.new_slot(known.get(id(sequence.prompt_ids))))
                known.setdefault(id(sequence.prompt_ids), KnownPrompt(sequence, len(sequence.block_ids)))
            else:
                new_token_ids = tuple(sequence.token_ids[sequence.num_sent_tokens :])
                if sequence.num_sent_blocks < len(sequence.block_ids):
                    new_block_ids = tuple(sequence.block_ids[sequence.num_sent_blocks :])
            start = sequence.num_computed
            draft = self.drafts.get(sequence, ())
            sequence.num_drafts = len(draft)
            sequence.num_computed = start + num - len(draft)
            num_known = max(len(sequence.token_ids), sequence.num_sent_tokens)
            num_placeholders = max(0, sequence.num_computed - num_known)
            sequence.num_sent_tokens = num_known + num_placeholders
            sequence.num_sent_blocks = len(sequence.block_ids)
            slots.append(
                SlotStep(
                    slot=sequence.slot,
                    start=start,
                    num_tokens=num,
                    new_token_ids=new_token_ids,
                    num_placeholders=num_placeholders,
                    new_block_ids=new_block_ids,
                    draft_token_ids=draft,
                    samples=sequence.num_computed >= len(sequence.token_ids),
                    num_proposals=self.proposals.get(sequence),
                    embeds=sequence.embeds_at(start, num),
                )
            )
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            adapter_loads=self.adapter_loads,
            freed_slots=freed_slots,
            new_slots=tuple(new_slots),
            host_stores=self.host_orders.stores,
            cleared_blocks=cleared_blocks,
            host_loads=self.host_orders.loads,
            block_copies=tuple(self.copies.values()),
            slots=tuple(slots),
        )


def _embeds_bytes(sequence: Sequence, first: int, num: int) -> int:
    """Returns the bytes of embeddings of the tokens [first, first + num) after the sequence's computed tokens."""
    embeds = sequence.embeds
    if embeds is None:
        return 0
    num_left = sequence.num_prompt_tokens - (sequence.num_computed + first)
    return embeds.row_bytes * max(0, min(num, num_left))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result has not arrived. When the result arrives, the plan's slots may belong to other sequences."""

    plan: StepPlan
    sequences: dict[int, Sequence]  # slot -> the sequence that had the slot when the plan was made


def fair_share(num_tokens: int, depth: int, max_tokens: int) -> int:
    """Returns the token budget of a plan when up to `depth` > 1 plans are in flight.

    `num_tokens`: all tokens in flight or still to compute. At any time each stage computes a different plan, so plans
    of equal size keep all stages busy.
    """
    return min(max_tokens, max(_LEAST_SHARE, -(-num_tokens // depth)))


def in_turn(decodes: list[Sequence], prefills: list[Sequence], budget: int, max_decodes: int) -> list[Sequence]:
    """Returns the sequences of this step in the order in which they get tokens. Both lists are sorted by urgency.

    At most `max_decodes` decodes are returned: those whose last step is longest ago. If the budget has room for all
    these decodes (and for one more token if there are prefills), decodes come first, then prefills, both by urgency.
    Otherwise decodes and prefills take turns: the sequence whose last step is longest ago comes first.
    """
    if len(decodes) > max_decodes:
        oldest = set(sorted(decodes, key=_last_turn)[:max_decodes])
        decodes = [sequence for sequence in decodes if sequence in oldest]
    if len(decodes) < budget or (len(decodes) == budget and not prefills):
        return [*decodes, *prefills]
    return sorted([*decodes, *prefills], key=_last_turn)


def _last_turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.last_turn
