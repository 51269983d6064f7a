"""StepPlan from the EngineCore to the ranks, and StepResult back: integers, strings and tuples only.

A rank keeps a table of slots, one per running sequence, and a plan changes it by difference. A sequence that is new to
the ranks (admitted, resumed after preemption, or any sequence after an epoch change) is sent once as a NewSlot. If the
ranks have a slot with the same prompt, NewSlot names that slot, so a prompt is sent once for all of its choices.
A rank takes token ids from plans alone, also ids that it has sampled itself, as stages that do not sample must.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.decoding import DecodingParams


class NewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a sequence for a rank that does not have it."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]  # prompt, unless `prompt_of` has it, then the generated ids
    num_prompt_tokens: int
    # KV block ids, in order of position; append-only until the slot is freed. Blocks before the window of the next
    # token are released and may belong to another sequence: their entries are never read.
    block_table: tuple[int, ...]
    prompt_of: int | None = None  # known slot whose first num_prompt_tokens ids come before token_ids
    num_shared_blocks: int = 0  # of the table of `prompt_of`; its first ones come before block_table
    params: DecodingParams
    eos_token_ids: tuple[int, ...]  # they end the sequence, as params.stop_token_ids do; empty with ignore_eos


class SlotStep(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one slot in this step: compute positions [start, start + num_tokens)."""

    slot: int
    start: int
    num_tokens: int  # >= 1
    new_token_ids: tuple[int, ...] = ()  # sampled since the last plan that named the slot; appended before computing
    new_block_ids: tuple[int, ...] = ()  # appended to the block table before computing
    samples: bool = False  # the last computed position is the sequence's last token: sample the next one


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step.

    Ranks apply it in this order: free slots, add slots, append ids, clear and copy blocks, compute, sample.
    """

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

    Without gc: there may be hundreds of thousands, never in a cycle, and each visit of the garbage collector to all of
    them would block every stream for 0.2 s.
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
    sample_s: float = 0.0  # seconds of sampling
