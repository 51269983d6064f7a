"""CachedTokens: how many tokens of waiting sequences are in the prefix index."""

from __future__ import annotations

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence

# A limit is needed because the main thread hashes blocks between two steps, and a full queue of long prompts has a
# million blocks. Hashing this many takes 5 ms.
MAX_HASHED_BLOCKS = 2048


class CachedTokens:
    """One pass over waiting sequences, in which at most MAX_HASHED_BLOCKS blocks are hashed.

    A sequence keeps the hashes of its blocks, because its admission needs them again. Blocks beyond the limit count as
    not cached until a later pass.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._num_to_hash = MAX_HASHED_BLOCKS

    def of(self, sequence: Sequence) -> int:
        """Returns how many leading tokens of the sequence are in the prefix index, in whole blocks.

        The last token is always computed, so it never counts as cached. With a sliding window, blocks behind a gap are
        left out.
        """
        if not self._config.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return 0
        block_size = self._config.block_size
        num_hashed = len(sequence.known_hashes)
        num_full = min((sequence.num_tokens - 1) // block_size, num_hashed + self._num_to_hash)
        self._num_to_hash -= max(0, num_full - num_hashed)
        return block_size * self._pool.num_leading(sequence.hashes(num_full, block_size))
