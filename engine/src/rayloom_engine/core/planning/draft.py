"""Draft: a plan in the making. It maps sequences to numbers of tokens and becomes the StepPlan for the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayloom_engine.core.sequence import KnownPrompt, Sequence
from rayloom_engine.core.step import SlotStep, StepPlan

# Fewer tokens cost a stage almost as much: it reads all of its weights for them.
_LEAST_SHARE = 64


@dataclass(slots=True)
class Draft:
    budget: int  # tokens that may still be handed out
    max_decodes: int  # sequences that may compute one token
    share: int | None = None  # prompt tokens that one tenant may compute; None = all
    num_tokens: dict[Sequence, int] = field(default_factory=dict)  # scheduled sequence -> tokens to compute
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # sequence -> (from, to) block ids
    is_short: bool = False  # of blocks: a running sequence was preempted or must wait, so none is admitted
    _prompt_tokens: dict[str, int] = field(default_factory=dict)  # tenant -> tokens counted against its share

    def room_for(self, tenant: str) -> int:
        """Prompt tokens that this tenant may still compute."""
        if self.share is None:
            return self.budget
        return max(0, min(self.budget, self.share - self._prompt_tokens.get(tenant, 0)))

    def take(self, sequence: Sequence, num: int, *, is_prompt: bool) -> None:
        """Gives the sequence `num` more tokens."""
        self.num_tokens[sequence] = self.num_tokens.get(sequence, 0) + num
        self.budget -= num
        if is_prompt:
            self._prompt_tokens[sequence.tenant] = self._prompt_tokens.get(sequence.tenant, 0) + num

    def drop(self, sequence: Sequence) -> None:
        """Takes the sequence out of this step."""
        self.budget += self.num_tokens.pop(sequence, 0)
        self.copies.pop(sequence, None)

    def to_plan(
        self,
        step_id: int,
        epoch: int,
        freed_slots: tuple[int, ...],
        cleared_blocks: tuple[int, ...],
        running: Iterable[Sequence],
    ) -> StepPlan:
        """The plan. From here on its tokens count as computed, and its ids and blocks as sent to the ranks.

        `running`: all sequences that have a slot.
        """
        new_slots = []
        slots = []
        # A prompt's identity -> a sequence with it that the ranks know, and the number of its blocks that they know
        # when they add this plan's slots. They append the plan's new blocks to known slots only after that.
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
                new_block_ids = tuple(sequence.block_ids[sequence.num_sent_blocks :])
            sequence.num_sent_tokens = sequence.num_tokens
            sequence.num_sent_blocks = len(sequence.block_ids)
            start = sequence.num_computed
            sequence.num_computed = start + num
            slots.append(
                SlotStep(
                    slot=sequence.slot,
                    start=start,
                    num_tokens=num,
                    new_token_ids=new_token_ids,
                    new_block_ids=new_block_ids,
                    samples=sequence.num_computed == sequence.num_tokens,
                )
            )
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            freed_slots=freed_slots,
            new_slots=tuple(new_slots),
            cleared_blocks=cleared_blocks,
            block_copies=tuple(self.copies.values()),
            slots=tuple(slots),
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan without a result yet. When the result arrives, its slots may belong to other sequences."""

    plan: StepPlan
    sequences: dict[int, Sequence]  # slot -> its sequence when the plan was made


def fair_share(num_tokens: int, depth: int, max_tokens: int) -> int:
    """The token budget of a plan when `num_tokens` are to be computed or in flight, with `depth` > 1 plans at once.

    Each stage computes another plan, so plans of equal size keep all stages busy.
    """
    return min(max_tokens, max(_LEAST_SHARE, -(-num_tokens // depth)))


def in_turn(decodes: list[Sequence], prefills: list[Sequence], budget: int, max_decodes: int) -> list[Sequence]:
    """The sequences of this step, in the order in which they get tokens; both arguments are sorted by urgency.

    Decodes come before prefills, and the more urgent first, while every decode gets its token. When the budget is too
    small for that, sequences alternate: the longest waiting come first, prefills among them.
    """
    if len(decodes) > max_decodes:
        oldest = set(sorted(decodes, key=_last_turn)[:max_decodes])
        decodes = [sequence for sequence in decodes if sequence in oldest]
    if len(decodes) < budget or (len(decodes) == budget and not prefills):
        return [*decodes, *prefills]
    return sorted([*decodes, *prefills], key=_last_turn)


def _last_turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.last_turn
