"""The tokens of a sequence that are in the prefix index."""

from __future__ import annotations

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence

# In one pass over the waiting sequences, at most this many of their blocks are hashed, which takes 5 ms. A limit is
# needed because the main thread does it between two steps, and a full queue of long prompts has a million blocks.
MAX_HASHED_BLOCKS = 2048


def num_cached_tokens(sequence: Sequence, config: SchedulerConfig, pool: BlockPool, most_hashed: int) -> int:
    """Returns how many leading tokens of the sequence are in the prefix index, in whole blocks.

    The last token is always computed, so it never counts as cached. At most `most_hashed` blocks are hashed; the
    sequence keeps their hashes, because its admission needs them again. All further blocks count as not cached until a
    later call. With a sliding window, blocks behind a gap are left out.
    """
    if not config.enable_prefix_caching or sequence.wants_prompt_logprobs:
        return 0
    num_full = min((sequence.num_tokens - 1) // config.block_size, len(sequence.known_hashes) + most_hashed)
    return config.block_size * pool.num_leading(sequence.hashes(num_full, config.block_size))
