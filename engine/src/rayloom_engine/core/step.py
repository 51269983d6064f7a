"""StepPlan, sent from the EngineCore to the ranks, and StepResult, sent back: integers, strings and tuples only.

A rank has a table of slots, one per running sequence; a plan contains only the changes to this table. A sequence that
is new to the ranks (admitted, resumed after preemption, or present at a change of the epoch) is sent once as a NewSlot.
If the ranks have a slot with the same prompt, NewSlot names that slot. So the prompt of a request is sent once for all
choices. A rank reads token ids from plans, even ids that it has sampled itself. The earlier stages of a pipeline do not
sample, so they have no other source of ids, and all stages work alike. Placeholders (`SlotStep.num_placeholders`) are
the exception. Only the rank of an engine with a single rank gets placeholders, because it samples every token itself.
The other kind of placeholder, `embeds.PLACEHOLDER_ID`, is the token id of a position with an embedding.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import Embeds

FIRST_EPOCH = 1  # of a server; each later epoch follows the loss of a process


class NewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank needs to know about a sequence that is new to it."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]  # prompt and generated ids; without the prompt if `prompt_of` is given
    num_prompt_tokens: int
    has_embeds: bool = False  # True: the prompt is one of embeddings, and its ids are placeholders
    # KV block ids, in order of position; append-only until the slot is freed. Entries before the sliding window of the
    # next token are never read: their blocks are released and may belong to another sequence.
    block_table: tuple[int, ...]
    prompt_of: int | None = None  # slot with the same prompt: its first num_prompt_tokens ids precede token_ids
    num_shared_blocks: int = 0  # this many entries of the block table of `prompt_of` precede block_table
    has_grammar_of_prompt: bool = False  # True: the slot `prompt_of` has the same grammar, so params leave it out
    adapter_slot: int = -1  # slot of the adapter that changes the model for this sequence; -1: none
    params: DecodingParams
    eos_token_ids: tuple[int, ...]  # ids that end the sequence, like params.stop_token_ids; empty with ignore_eos


class SlotStep(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one slot in this step: compute positions [start, start + num_tokens)."""

    slot: int
    start: int
    num_tokens: int  # >= 1
    new_token_ids: tuple[int, ...] = ()  # sampled since the slot's last plan; appended before computing
    # A rank keeps a list of sampled ids that no plan has sent yet. The rank first removes the ids in new_token_ids from
    # this list. Then it appends this many ids of the list, oldest first, to the slot's tokens.
    num_placeholders: int = 0
    new_block_ids: tuple[int, ...] = ()  # appended to the block table before computing
    # Draft tokens. They follow the slot's newest token, and are the last of the `num_tokens` that this step computes.
    # The rank samples at the position before each draft token, and at the last draft token. It accepts the draft up to
    # the first draft token that differs from the sampled token.
    draft_token_ids: tuple[int, ...] = ()
    samples: bool = False  # True: the slot's newest token is computed, so the rank samples the next token
    # With a draft model: after sampling, the rank proposes at most this many tokens after the slot's newest token.
    # 0: the draft model only computes the KV of the step's tokens, so that it can propose tokens later. None: it does
    # nothing for the slot; the rank computes the missing KV when a later step needs it.
    num_proposals: int | None = None
    # Embeddings of the first of these positions, up to the end of the step or of the prompt. Only the ranks of the
    # first stage use them. A rank keeps no embeddings: the core sends those of each step, so that a chunk, a sequence
    # that was preempted and a replay need nothing else.
    embeds: Embeds | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The orders of the core to every rank for one step.

    A rank frees slots, adds slots, appends ids, loads adapters, stores blocks in host memory, clears blocks, loads
    blocks from host memory, copies blocks, computes and samples, in this order.
    """

    step_id: int
    epoch: int  # a rank refuses a plan of another epoch
    adapter_loads: tuple[AdapterLoad, ...] = ()
    freed_slots: tuple[int, ...] = ()
    new_slots: tuple[NewSlot, ...] = ()
    # (block, host slot): blocks to copy to host memory. They may have new owners in this plan.
    host_stores: tuple[tuple[int, int], ...] = ()
    cleared_blocks: tuple[int, ...] = ()  # blocks to fill with zeros, because they may hold a NaN of an earlier owner
    host_loads: tuple[tuple[int, int], ...] = ()  # (host slot, block): copies to bring back from host memory
    block_copies: tuple[tuple[int, int], ...] = ()  # (from, to) block ids, for copy-on-write
    slots: tuple[SlotStep, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(slot.num_tokens for slot in self.slots)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of one position: of the actual token, and of the most likely tokens in descending order.

    With gc=False, the garbage collector does not visit these objects. There may be hundreds of thousands of them, and a
    collection that visits them all would block every stream for 0.2 s. They are never part of a reference cycle.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


class SampledToken(msgspec.Struct, frozen=True):
    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Proposal(msgspec.Struct, frozen=True):
    """The tokens that the draft model proposes after the newest token of a slot, which this step has sampled."""

    slot: int
    token_ids: tuple[int, ...]  # not empty


class DraftWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the draft model in a step, as the rank has measured it.

    A pass that computes no more than the newest tokens of its slots, and proposes tokens, counts as a pass of
    proposals. Any other pass counts as catching up: it computes tokens of prompts, or tokens that the draft model has
    left out before.
    """

    proposal_s: float = 0.0  # seconds of all passes of proposals
    num_passes: int = 0  # passes of proposals
    num_served: int = 0  # slots that get proposals; the later passes may serve fewer
    catch_up_s: float = 0.0  # seconds of the pass that catches up; there is at most one in a step
    num_catch_up_tokens: int = 0  # tokens of this pass
    # Slots that should propose tokens, and that the draft model has not caught up with. They get proposals later.
    lagging_slots: tuple[int, ...] = ()
    whole_blocks: tuple[int, ...] = ()  # blocks of which the draft model has now computed all tokens

    @property
    def seconds(self) -> float:
        return self.proposal_s + self.catch_up_s


class BrokenForm(msgspec.Struct, frozen=True):
    """A slot whose grammar cannot be applied (GrammarFault). No token is sampled for the slot."""

    slot: int
    message: str


class BrokenAdapter(msgspec.Struct, frozen=True):
    """An adapter slot whose adapter could not be loaded. No token is sampled for the sequences that use the slot."""

    adapter_slot: int
    slots: tuple[int, ...]  # the plan's slots of these sequences; their KV blocks hold values of the plain model
    message: str


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of the prompt tokens at positions start, start + 1, ... Position 0 has no logprobs."""

    slot: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step_id: int
    epoch: int
    # One token for each SlotStep with `samples`, in plan order. Corrupt, broken and postponed slots have no token. A
    # dirty slot has no token if its first row is not finite.
    sampled: tuple[SampledToken, ...] = ()
    # The accepted draft tokens, for each slot in order of position. The slot's token in `sampled` follows them.
    accepted: tuple[SampledToken, ...] = ()
    # Slots with a draft, and with logits that are not finite in at least one row. Tokens from earlier rows are valid.
    # The slot is computed again without a draft, because the draft may be the cause.
    dirty_slots: tuple[int, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    corrupt_slots: tuple[int, ...] = ()  # slots whose logits are not finite; no token is sampled for them
    broken_forms: tuple[BrokenForm, ...] = ()
    broken_adapters: tuple[BrokenAdapter, ...] = ()  # adapters that could not be loaded
    postponed_slots: tuple[int, ...] = ()  # slots of the plan whose mask is not ready; no token is sampled for them
    waiting_slots: tuple[int, ...] = ()  # slots that were postponed and whose grammar is not built yet
    proposals: tuple[Proposal, ...] = ()  # of the draft model; at most one for each slot that sampled a token
    forward_s: float = 0.0  # seconds that the model's forward pass took
    sample_s: float = 0.0  # seconds that sampling took
    waited_s: float = 0.0  # part of sample_s: seconds in which the step waited for a grammar
    draft_work: DraftWork | None = None  # None: the draft model computed nothing, or the rank has none
