"""The number of prompt tokens that a request writes into the prefix cache, for `usage` of Responses and Messages."""

from __future__ import annotations

from rayloom_engine.config import BLOCK_SIZE, EngineConfig


def num_cache_writes(config: EngineConfig, num_prompt_tokens: int, num_cached_tokens: int) -> int:
    """Returns the number of tokens in those full blocks of the prompt that were not cached.

    Without prefix caching, returns 0.
    """
    if not config.enable_prefix_caching:
        return 0
    return max(0, num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE - num_cached_tokens)
