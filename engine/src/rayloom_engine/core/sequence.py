"""One sequence as the scheduler sees it: the log of its ids, and how far the ranks have computed it.

There is no prefill or decode mode. A sequence has `num_tokens` and `num_computed`; every step lets the second catch up.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum

import msgspec

from rayloom_engine.core.block_hash import block_hash, encode_extra
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, TokenLogprobs

CORRUPT = "corrupt"  # finish reason of a sequence whose logits were not finite; clients get an error


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable and private to the scheduler. What it says about KV blocks is a cache that can be thrown away."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: SequenceOf[int],
        params: DecodingParams,
        eos_token_ids: tuple[int, ...] = (),
        generated_ids: SequenceOf[int] = (),
        priority: int = 0,
        arrival: float = 0.0,
        fork_of: str | None = None,
        tenant: str = "",
        cache_key: bytes = b"",
    ) -> None:
        """Slots and queue are shared by `tenant`; sequences share cached blocks only where `cache_key` is equal.

        Sequences with the same prompt should be given the same tuple: that is how the scheduler finds them fast.
        """
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids = [*prompt_ids, *generated_ids]
        self.num_prompt_tokens = len(prompt_ids)
        if generated_ids:
            # A resumed sequence has delivered its prompt's logprobs before.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        self.params = params
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        self.priority = priority
        self.arrival = arrival
        self.number = 0  # order of arrival in this scheduler; breaks ties
        self.fork_of = fork_of
        self.tenant = tenant
        self.cache_key = cache_key

        self.state = SequenceState.WAITING
        self.num_computed = 0  # tokens whose KV is in the blocks, counting plans in flight
        self.last_turn = (0, 0)  # last step that computed some of it, and its place there
        self.num_overtakers = 0  # admitted before it while it waited for blocks
        self.num_overtaking_tokens = 0  # the tokens of those
        self.block_ids: list[int] = []  # in order of position; those before `first_block` are given back already
        self.first_block = 0  # no later token sees a block before it
        self.num_proven = 0  # tokens whose KV has led to finite logits
        self.own_blocks: frozenset[int] = frozenset()  # that it filled before it was preempted; it may find them again
        self.slot: int | None = None  # row on the ranks while RUNNING
        self.num_sent_blocks = 0  # of block_ids, known to the ranks; 0 = the ranks do not know the sequence
        self.num_sent_tokens = 0  # of token_ids, likewise
        self.num_registered_blocks = 0  # full blocks offered to the prefix index
        self.num_cached_tokens: int | None = None  # found in the prefix cache at first admission; None before
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] = []  # of positions 1, 2, ... in order
        self._hashes: list[bytes] = []  # of the full blocks of token_ids, in order

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that it still holds, in order of position."""
        return self.block_ids[self.first_block :]

    @property
    def known_hashes(self) -> list[bytes]:
        """The hashes of its full blocks that were computed so far; those of all registered blocks are among them."""
        return self._hashes

    def num_proven_blocks(self, block_size: int) -> int:
        """How many of its blocks, from the first on, hold nothing but KV that has led to finite logits."""
        if self.num_computed <= self.num_proven:
            return len(self.block_ids)
        return self.num_proven // block_size

    @property
    def order(self) -> tuple[int, float, int]:
        """First come, first served within a priority; lower runs first."""
        return (self.priority, self.arrival, self.number)

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, all full. Computed once; ids never change."""
        while len(self._hashes) < num_blocks:
            start = len(self._hashes) * block_size
            token_ids = self.token_ids[start : start + block_size]
            if self._hashes:
                self._hashes.append(block_hash(self._hashes[-1], token_ids, b""))
            else:
                # The first block separates the whole chain of sequences with different salts.
                self._hashes.append(block_hash(b"", token_ids, encode_extra([("salt", self.cache_key)])))
        return self._hashes[:num_blocks]

    def adopt_hashes(self, other: Sequence, block_size: int) -> None:
        """Takes over the hashes of the prompt's blocks that `other` has computed, if both have the same prompt."""
        if not self._hashes and self.cache_key == other.cache_key and self.has_prompt_of(other):
            self._hashes = other._hashes[: self.num_prompt_tokens // block_size]

    def forget_blocks(self) -> None:
        """Nothing is computed any more; the ids stay, and everything can be computed again from them."""
        self.block_ids = []
        self.first_block = 0
        self.num_proven = 0
        self.num_computed = 0
        self.num_sent_blocks = 0
        self.num_sent_tokens = 0
        self.num_registered_blocks = 0

    def has_prompt_of(self, other: Sequence) -> bool:
        return self.prompt_ids is other.prompt_ids or self.prompt_ids == other.prompt_ids

    def new_slot(self, known: KnownPrompt | None = None) -> NewSlot:
        """All that a rank must know of it. `known` has the same prompt."""
        assert self.slot is not None
        num_known_tokens = 0
        num_known_blocks = 0
        if known is not None:
            num_known_tokens = self.num_prompt_tokens
            # Blocks of a fork and those that were found in the prefix cache; the others are its own. Entries before the
            # first block are never read.
            first = self.first_block
            num = self.num_registered_blocks
            if num <= known.num_blocks and known.sequence.block_ids[first:num] == self.block_ids[first:num]:
                num_known_blocks = num
        return NewSlot(
            slot=self.slot,
            request_id=self.request_id,
            prompt_of=None if known is None else known.sequence.slot,
            token_ids=tuple(self.token_ids[num_known_tokens:]),
            num_prompt_tokens=self.num_prompt_tokens,
            num_shared_blocks=num_known_blocks,
            block_table=tuple(self.block_ids[num_known_blocks:]),
            params=self.params,
            eos_token_ids=self.eos_token_ids,
        )

    def finish_reason(self, max_model_len: int) -> str | None:
        """Why the sequence is complete with its newest token, or None while it is not."""
        newest = self.token_ids[-1]
        if self.num_generated > 0 and (newest in self.eos_token_ids or newest in self.params.stop_token_ids):
            return "stop"
        if self.num_generated >= self.params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A sequence whose prompt, and the first `num_blocks` of whose block table, the ranks know."""

    sequence: Sequence
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What a step brought for one sequence."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
