"""What crosses between the core and a rank: a StepPlan out, a StepResult back. Integers, strings and tuples only.

A rank keeps a table of slots, one per running sequence. A plan changes it by difference; a sequence that is new to the
ranks (admitted, resumed after preemption, or everything after an epoch change) crosses once as a NewSlot. One with the
same prompt as a slot that the ranks know names that slot, so a prompt crosses once for all of its choices.
A rank learns token ids from plans alone, also those that it sampled itself: stages that do not sample know them too.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.decoding import DecodingParams


class NewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank must know of a sequence that it has not seen, or has forgotten."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]  # prompt, unless `prompt_of` has it, then whatever was already generated
    num_prompt_tokens: int
    # KV block ids, in order of position; append-only until the slot is freed. Blocks before the window of the next
    # token are given back and may be somebody else's: their entries are never read.
    block_table: tuple[int, ...]
    prompt_of: int | None = None  # slot known by now whose first num_prompt_tokens ids come before token_ids
    num_shared_blocks: int = 0  # of the table of `prompt_of`; its first ones come before block_table
    params: DecodingParams
    eos_token_ids: tuple[int, ...]  # what ends the sequence (empty with ignore_eos), besides params.stop_token_ids


class SlotStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot does in this step: compute positions [start, start + num_tokens)."""

    slot: int
    start: int
    num_tokens: int  # >= 1
    new_token_ids: tuple[int, ...] = ()  # sampled since the last plan that named the slot; appended before computing
    new_block_ids: tuple[int, ...] = ()  # appended to the block table before computing
    samples: bool = False  # the last computed position is the sequence's last token: choose the next one


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Applied in this order: free slots, add slots, append ids, clear and copy blocks, compute, sample."""

    step_id: int
    epoch: int  # a rank refuses a plan of another epoch than its own
    freed_slots: tuple[int, ...] = ()
    new_slots: tuple[NewSlot, ...] = ()
    cleared_blocks: tuple[int, ...] = ()  # blocks that may hold a NaN of an earlier owner; filled with zeros
    block_copies: tuple[tuple[int, int], ...] = ()  # (from, to) block ids, for copy-on-write
    slots: tuple[SlotStep, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(slot.num_tokens for slot in self.slots)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of one position: the actual token, and the most likely ones in descending order.

    Hundreds of thousands may be held. They are in no cycle, and each look of the garbage collector at all of them
    would hold up every stream for 0.2 s.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


class SampledToken(msgspec.Struct, frozen=True):
    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of prompt tokens at positions start, start + 1, ... (position 0 has none)."""

    slot: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step_id: int
    epoch: int
    sampled: tuple[SampledToken, ...] = ()  # for each SlotStep with `samples` that is not corrupt, in plan order
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    corrupt_slots: tuple[int, ...] = ()  # slots whose logits are not finite; no token is sampled for them
    forward_s: float = 0.0  # seconds in the model
    sample_s: float = 0.0  # seconds choosing tokens
