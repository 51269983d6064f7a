"""A sequence in the scheduler: its token ids, and how many of them the ranks have computed.

There is no prefill or decode mode. A sequence has `num_tokens` and `num_computed`, and in every step `num_computed`
catches up.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum

import msgspec

from rayloom_engine.core.block_hash import next_block_hash
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import Embeds, embeds_of
from rayloom_engine.core.speculation.draft_grammars import DraftGrammar
from rayloom_engine.core.speculation.drafter import Drafter
from rayloom_engine.core.speculation.model_drafter import ModelDrafter
from rayloom_engine.core.step import NewSlot, TokenLogprobs

CORRUPT = "corrupt"  # finish reason of a sequence whose logits were not finite; clients get an error
BROKEN_FORM = "broken_form"  # finish reason of a sequence whose grammar has failed; clients get an error
# finish reason of a sequence whose adapter the rank that answers cannot load; clients get an error
BROKEN_ADAPTER = "broken_adapter"


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The sender of a sequence. The sender decides the order in the queue, and which prefixes may be reused."""

    priority: int = 0  # the lowest value runs first, among the sequences of a tenant
    arrival: float = 0.0  # Unix time; decides the order within a priority
    tenant: str = ""  # tenants share slots, queue and blocks fairly
    cache_key: bytes = b""  # only sequences with the same key share cached blocks


NO_ORIGIN = Origin()  # origin of all sequences on a server without API keys, and of the engine's own probes


class Sequence:
    """A waiting or running sequence. Mutable and private to the scheduler.

    The KV blocks of a sequence are only a cache: they can be computed from its token ids.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: SequenceOf[int],
        params: DecodingParams,
        eos_token_ids: tuple[int, ...] = (),
        generated_ids: SequenceOf[int] = (),
        fork_of: str | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> None:
        """`fork_of`: request id of a sequence with the same prompt, whose blocks this sequence may share.

        Pass the same tuple as `prompt_ids` for sequences with the same prompt: the scheduler compares identities first.
        An EmbeddedPrompt as `prompt_ids` is a prompt of embeddings.
        """
        self.request_id = request_id
        self.prompt_ids = prompt_ids if isinstance(prompt_ids, tuple) else tuple(prompt_ids)
        self.token_ids = [*prompt_ids, *generated_ids]
        self.num_prompt_tokens = len(prompt_ids)
        if generated_ids:
            # In a resume, the client already has the logprobs of the prompt.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        self.params = params
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        self.priority = origin.priority
        self.arrival = origin.arrival
        self.number = 0  # number of the sequence in this scheduler, by arrival; breaks ties
        self.fork_of = fork_of
        self.tenant = origin.tenant
        self.cache_key = origin.cache_key

        self.state = SequenceState.WAITING
        self.num_computed = 0  # tokens whose KV is in the blocks, or will be after the plans in flight
        # draft tokens of the plan in flight. Their KV follows the KV of the first `num_computed` tokens. An accepted
        # draft token counts in `num_computed`.
        self.num_drafts = 0
        self.has_dirty_drafts = False  # True if a draft had logits that are not finite
        self.drafter: Drafter | ModelDrafter | None = None
        self.draft_grammar: DraftGrammar | None = None  # cuts drafts to legal tokens; only while RUNNING
        self.last_turn = (0, 0)  # (id of the last step with this sequence, its index in that step)
        self.num_overtakers = 0  # sequences that overtook this sequence while it waited for blocks or an adapter slot
        self.num_overtaking_tokens = 0  # tokens of the sequences that num_overtakers counts
        self.block_ids: list[int] = []  # KV blocks in order of position; those before index `first_block` are released
        self.first_block = 0  # index in block_ids; no later token attends to an earlier block (sliding window)
        self.num_proven = 0  # leading tokens with proven KV: finite logits were computed from this KV
        # blocks that the sequence filled before a preemption, and may reuse
        self.own_blocks: frozenset[int] = frozenset()
        self.slot: int | None = None  # row in the ranks' table while RUNNING
        self.adapter_slot = -1  # adapter slot on the ranks while RUNNING; -1: none
        self.num_sent_blocks = 0  # entries of block_ids that the ranks have; 0 = the ranks do not have the sequence
        self.num_sent_tokens = 0  # tokens that the ranks have: entries of token_ids, and placeholders
        self.num_registered_blocks = 0  # full blocks offered to the prefix index
        self.waits_for_form = False  # the next token waits for a grammar that the sampling rank builds
        # prompt tokens found in the prefix cache at the first admission; None before that
        self.num_cached_tokens: int | None = None
        self.queued_at = 0.0  # time, by the Engine's clock, at which the Engine accepted the sequence
        self.queue_s: float | None = None  # seconds from acceptance to the first step; None before that
        self.num_preemptions = 0
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] = []  # logprobs of the prompt's positions 1, 2, ... in order
        self._hashes: list[bytes] = []  # hashes of the full blocks of token_ids, in order

    @property
    def embeds(self) -> Embeds | None:
        """The embeddings of the prompt; None for a prompt of token ids."""
        return embeds_of(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_placeholders(self) -> int:
        """Number of tokens that plans in flight sample: their positions are known, their ids are not."""
        return max(0, self.num_computed + 1 - len(self.token_ids))

    def may_run_ahead(self, num_ahead: int, max_model_len: int) -> bool:
        """Returns whether a plan may compute the newest placeholder, and sample the token that follows it.

        False if the sequence has `num_ahead` such plans in flight, or if the placeholder is the last token that the
        sequence can get. False also if the placeholder's mask may be late: the rank then samples no token, and the
        placeholder would never get an id.
        """
        num = self.num_placeholders
        return (
            0 < num <= num_ahead
            and not self.params.has_mask
            and self.num_generated + num < self.params.max_tokens
            and len(self.token_ids) + num < max_model_len
        )

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that the sequence still holds, in order of position."""
        return self.block_ids[self.first_block :]

    @property
    def known_hashes(self) -> list[bytes]:
        """The hashes of the sequence's first full blocks, as far as hashes were computed.

        They include the hashes of all blocks that were offered to the prefix index (`num_registered_blocks`).
        """
        return self._hashes

    def num_proven_blocks(self, block_size: int) -> int:
        """Number of leading blocks that are proven: finite logits were computed from all KV in them."""
        if self.num_computed + self.num_drafts <= self.num_proven:
            return len(self.block_ids)
        return self.num_proven // block_size

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: the lowest value runs first. First come, first served within a priority."""
        return (self.priority, self.arrival, self.number)

    def hashes(self, num_blocks: int, block_size: int, first: int = 0) -> list[bytes]:
        """Returns the hashes of the blocks [first, num_blocks), which must be full.

        Each hash is computed once, because the token ids of a full block never change.
        """
        while len(self._hashes) < num_blocks:
            start = len(self._hashes) * block_size
            token_ids = self.token_ids[start : start + block_size]
            digest = self.params.adapter_digest
            embeds = self.embeds_at(start, block_size)
            embeds_digest = b"" if embeds is None else embeds.digest()
            self._hashes.append(next_block_hash(self._hashes, token_ids, self.cache_key, digest, embeds_digest))
        return self._hashes[first:num_blocks]

    def embeds_at(self, start: int, num: int) -> Embeds | None:
        """Returns the embeddings of the positions [start, start + num), which may end after the prompt.

        None if none of these positions has an embedding.
        """
        if start >= self.num_prompt_tokens:
            return None
        embeds = self.embeds
        return None if embeds is None else embeds.rows(start, start + num)

    def adopt_hashes(self, other: Sequence, block_size: int) -> None:
        """Copies the prompt's block hashes from `other`, if both sequences have the same prompt and share a cache."""
        if not self._hashes and self.shares_cache_with(other) and self.has_prompt_of(other):
            self._hashes = other._hashes[: self.num_prompt_tokens // block_size]

    def forget_blocks(self) -> None:
        """Forgets the KV blocks and all progress. The token ids stay, so everything can be computed again."""
        self.block_ids = []
        self.first_block = 0
        self.num_proven = 0
        self.num_computed = 0
        self.num_drafts = 0
        self.num_sent_blocks = 0
        self.num_sent_tokens = 0
        self.num_registered_blocks = 0
        self.waits_for_form = False
        self.draft_grammar = None

    def postpone(self) -> None:
        """Marks the newest token as not computed, because no token was sampled from it."""
        assert self.num_computed == len(self.token_ids)
        self.num_computed -= 1

    def shares_cache_with(self, other: Sequence) -> bool:
        """True if equal tokens of both sequences give equal KV blocks, and both may use the same blocks."""
        return self.cache_key == other.cache_key and self.params.adapter_digest == other.params.adapter_digest

    def has_prompt_of(self, other: Sequence) -> bool:
        return self.prompt_ids is other.prompt_ids or self.prompt_ids == other.prompt_ids

    def new_slot(self, known: KnownPrompt | None = None) -> NewSlot:
        """Describes this sequence to the ranks. `known`: a sequence with the same prompt that the ranks have."""
        assert self.slot is not None
        params = self.params
        num_known_tokens = 0
        num_known_blocks = 0
        has_known_grammar = False
        if known is not None:
            num_known_tokens = self.num_prompt_tokens
            has_known_grammar = bool(params.grammar) and params.grammar == known.sequence.params.grammar
            # Two block tables have entries in common only through a fork or the prefix cache, so only registered blocks
            # are compared. Entries before `first` are never read. Before its `first_block`, `known` may have other
            # entries on the ranks, because these may come from the slot of a third sequence with the same prompt.
            other, first = known.sequence, self.first_block
            num = self.num_registered_blocks
            has_entries = other.first_block <= first and num <= known.num_blocks
            if has_entries and other.block_ids[first:num] == self.block_ids[first:num]:
                num_known_blocks = num
        if has_known_grammar:
            params = msgspec.structs.replace(params, grammar="")
        return NewSlot(
            slot=self.slot,
            request_id=self.request_id,
            prompt_of=None if known is None else known.sequence.slot,
            token_ids=tuple(self.token_ids[num_known_tokens:]),
            num_prompt_tokens=self.num_prompt_tokens,
            has_embeds=self.embeds is not None,
            num_shared_blocks=num_known_blocks,
            block_table=tuple(self.block_ids[num_known_blocks:]),
            has_grammar_of_prompt=has_known_grammar,
            adapter_slot=self.adapter_slot,
            params=params,
            eos_token_ids=self.eos_token_ids,
        )

    def finish_reason(self, max_model_len: int) -> str | None:
        """Returns why the newest token completes the sequence ("stop" or "length"); None if the sequence continues."""
        newest = self.token_ids[-1]
        num_tokens = len(self.token_ids)
        num_generated = num_tokens - self.num_prompt_tokens
        if num_generated > 0 and (newest in self.eos_token_ids or newest in self.params.stop_token_ids):
            return "stop"
        if num_generated >= self.params.max_tokens or num_tokens >= max_model_len:
            return "length"
        return None


def order_of(sequence: Sequence) -> tuple[int, float, int]:
    """Returns the order of the sequence: a function for the `key` of a sort."""
    return sequence.order


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A sequence whose prompt the ranks have, and the first `num_blocks` entries of its block table."""

    sequence: Sequence
    num_blocks: int
