"""A plan being made: which sequences compute how many tokens, and the StepPlan that tells the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import SlotStep, StepPlan

# Fewer tokens cost a stage almost as much: it reads all of its weights for them.
_LEAST_SHARE = 64


@dataclass(slots=True)
class Draft:
    budget: int  # tokens that may still be handed out
    max_decodes: int  # sequences that may compute one token
    num_tokens: dict[Sequence, int] = field(default_factory=dict)  # what each scheduled sequence computes
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    is_short: bool = False  # of blocks: a running sequence was preempted or must wait, so nobody is admitted

    def to_plan(
        self, step_id: int, epoch: int, freed_slots: tuple[int, ...], cleared_blocks: tuple[int, ...] = ()
    ) -> StepPlan:
        """The plan, booked: its tokens count as computed, and what it says as sent, from here on."""
        new_slots = []
        slots = []
        for sequence, num in self.num_tokens.items():
            assert sequence.slot is not None
            new_token_ids: tuple[int, ...] = ()
            new_block_ids: tuple[int, ...] = ()
            if sequence.num_sent_blocks == 0:
                new_slots.append(sequence.new_slot())
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
    """A plan without a result yet. Slots may have another owner by the time that it comes."""

    plan: StepPlan
    sequences: dict[int, Sequence]  # slot -> whom it belonged to when the plan was made


def fair_share(num_tokens: int, depth: int, max_tokens: int) -> int:
    """The token budget of a plan where `num_tokens` are to be computed, or are in flight, with `depth` > 1 at once.

    Each stage works on another plan, so plans of equal size keep all of them busy.
    """
    return min(max_tokens, max(_LEAST_SHARE, -(-num_tokens // depth)))
