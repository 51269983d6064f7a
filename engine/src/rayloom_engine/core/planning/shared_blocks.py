"""SharedBlocks: computed KV blocks that a waiting sequence can share when it is admitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.window import first_seen_block, longest_hit


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Computed blocks that a sequence can share: its blocks from index `first` on.

    No later token attends to a block before `first`. None stands for a block whose copy is in host memory alone.
    `source`: a block that the sequence must copy, or None.
    """

    first: int = 0
    block_ids: tuple[int | None, ...] = ()
    source: int | None = None

    @property
    def present(self) -> list[int]:
        """The blocks that are in the ranks' device memory."""
        return [block_id for block_id in self.block_ids if block_id is not None]

    @property
    def end(self) -> int:
        """Index of the first block that is not shared."""
        return self.first + len(self.block_ids)


class SharedBlocks:
    """Finds blocks in the prefix index and in host memory, and blocks of the choice that computes the prompt."""

    def __init__(self, config: SchedulerConfig, sequences: Mapping[str, Sequence], running: RunningSequences) -> None:
        """`sequences`: request id -> every unfinished sequence."""
        self._config = config
        self._sequences = sequences
        self._running = running

    def leader(self, sequence: Sequence) -> Sequence | None:
        """Returns choice 0 of the same request if it runs and `sequence` may share its prompt's blocks; else None."""
        if sequence.fork_of is None or sequence.wants_prompt_logprobs or sequence.num_generated:
            return None
        leader = self._sequences.get(sequence.fork_of)
        if leader is None or leader.state is not SequenceState.RUNNING or leader.order > sequence.order:
            return None
        is_alike = leader.tenant == sequence.tenant and leader.shares_cache_with(sequence)
        # With a sliding window, a leader that is far ahead may have released blocks that the fork needs.
        first = first_seen_block(sequence.num_prompt_tokens - 1, self._config.window, self._config.block_size)
        return leader if is_alike and leader.first_block <= first and sequence.has_prompt_of(leader) else None

    def known(self, sequence: Sequence, leader: Sequence | None) -> SharedPrefix:
        """Returns the computed blocks that the sequence can share, and a block of the leader that it must copy.

        The last token of a prompt is always computed, because the next token is sampled from its logits. A fork
        therefore soon writes to the block of that token. So the fork gets a copy of this block when it is admitted
        (copy-on-write), and the leader's block table never changes. While the leader's generated tokens in that block
        may hold a NaN, the fork copies nothing and computes the block itself.
        """
        block_size = self._config.block_size
        if leader is not None:
            num_shared = (sequence.num_prompt_tokens - 1) // block_size
            is_shared_whole = num_shared * block_size == sequence.num_prompt_tokens - 1
            first = first_seen_block(sequence.num_prompt_tokens - 1, self._config.window, block_size)
            if is_shared_whole or not _has_doubtful_rest(leader, num_shared, block_size):
                source = None if is_shared_whole else leader.block_ids[num_shared]
                return SharedPrefix(first, tuple(leader.block_ids[first:num_shared]), source)
            first = first_seen_block(num_shared * block_size, self._config.window, block_size)
            if leader.first_block <= first:
                return SharedPrefix(first, tuple(leader.block_ids[first:num_shared]))
        if not self._config.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return SharedPrefix()
        num_full = (sequence.num_tokens - 1) // block_size
        hashes = sequence.hashes(num_full, block_size)
        known = self._running.pool.known(hashes, sequence.own_blocks)
        found: list[object | None] = list(known)
        tier = self._running.tier
        if tier is not None:
            for index, content in enumerate(hashes):
                if found[index] is None and tier.slots.may_load(content, sequence.number):
                    found[index] = content
        first, end = longest_hit(found, self._config.window, block_size)
        return SharedPrefix(first, tuple(known[first:end]))


def _has_doubtful_rest(leader: Sequence, index: int, block_size: int) -> bool:
    """True if the leader's block at `index`, where the prompt ends, has generated tokens whose KV may hold a NaN.

    The last token of the prompt does not count, because a fork computes this token again.
    """
    end = min(leader.num_computed, (index + 1) * block_size)
    return end > leader.num_prompt_tokens and leader.num_proven < end
