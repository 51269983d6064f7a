"""Chunk sizes: the number of a prompt's tokens that one step computes when its context is long.

A token of a chunk attends to every position before it, so a step's attention costs chunk x context, and a token budget
alone does not limit it: with 512 tokens a step, an 8B model's attention costs 0.3 times as much as the rest of a layer
at 8,192 positions, and 5 times as much at 131,072. All other sequences of the batch would wait for that.
"""

from __future__ import annotations

from math import isqrt

from rayloom_engine.core.planning.step_builder import StepBuilder

# Up to this context a chunk may be a whole token budget. Beyond it a step's long contexts together cost no more
# attention than a budget at this context, where attention takes an 8B model 0.6 times as long as its weights.
FULL_BUDGET_CONTEXT = 16_384
# Every step reads all weights, so smaller chunks would make a prompt slower and no step faster.
LEAST_CHUNK = 64


def chunk_size(
    start: int, num_tokens: int, builder: StepBuilder, max_num_batched_tokens: int, window: int | None = None
) -> int:
    """Tokens that a sequence of `num_tokens`, of which `start` are computed, may compute in the step of `builder`.

    `window`: positions that a token sees at most; None: all. Returns 0 when sequences before it use up the step's
    attention for long contexts. Decodes and short contexts always get their share of the token budget.
    """
    room = max_num_batched_tokens * FULL_BUDGET_CONTEXT
    most = min(num_tokens - start, builder.budget)
    num_seen = _num_seen(start, window)
    if most <= 1 or num_seen + most <= FULL_BUDGET_CONTEXT:
        return most
    spent = sum(_long_attention(_num_seen(s.num_computed, window), num) for s, num in builder.num_tokens.items())
    chunk = min(most, largest_chunk(num_seen, room - spent))
    least = min(most, LEAST_CHUNK)
    if chunk >= least:
        return chunk
    return 0 if spent else least


def largest_chunk(start: int, room: int) -> int:
    """The largest n with n x (start + n) <= room; 0 without room."""
    return (isqrt(start * start + 4 * room) - start) // 2 if room > 0 else 0


def _num_seen(start: int, window: int | None) -> int:
    """Positions before a chunk at `start` that its tokens attend to."""
    return start if window is None else min(start, window)


def _long_attention(num_seen: int, num_tokens: int) -> int:
    """Chunk x context of a chunk with a long context; nothing for decodes and short contexts."""
    context = num_seen + num_tokens
    return num_tokens * context if num_tokens > 1 and context > FULL_BUDGET_CONTEXT else 0
