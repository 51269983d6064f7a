"""Chunk sizes: how many tokens of a prompt with a long context one step computes.

A token of a chunk attends to every position before it, so a step's attention costs chunk x context. A token budget
alone does not limit this cost. For example, let an 8B model compute 512 tokens in a step. At 8,192 positions, its
attention takes 0.3 times as long as the rest of a layer; at 131,072 positions, 5 times as long. All other sequences of
the step would wait for this chunk.
"""

from __future__ import annotations

from math import isqrt

from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.window import num_seen

# Up to this context, a chunk may use the whole token budget. In one step, all chunks with longer contexts together may
# cost as much attention as one chunk of the whole budget at this context. At this context, an 8B model spends 0.6 times
# as long on attention as on its weights.
FULL_BUDGET_CONTEXT = 16_384
# Every step reads all weights, so smaller chunks would slow the prompt down without making a step faster.
LEAST_CHUNK = 64


def chunk_of(sequence: Sequence, start: int, builder: StepBuilder, max_tokens: int, config: SchedulerConfig) -> int:
    """Returns how many tokens of the sequence, from position `start` on, the step of `builder` may compute.

    At most `max_tokens`; 0 if their attention would cost too much, or if the step has no room for their embeddings.
    """
    num_taken = builder.num_tokens.get(sequence, 0)
    chunk = chunk_size(start, sequence.num_tokens, builder, config.max_num_batched_tokens, config.window, num_taken)
    if builder.prompt_time is not None:
        chunk = min(chunk, builder.prompt_time.most(start))
    chunk = builder.most_with_embeds(sequence, start, min(max_tokens, chunk))
    if builder.leaves_last_tokens and start + chunk == sequence.num_tokens and not sequence.num_generated:
        least = 0 if sequence in builder.num_tokens else 1
        return max(least, chunk - 1)
    return chunk


def chunk_size(
    start: int,
    num_tokens: int,
    builder: StepBuilder,
    max_num_batched_tokens: int,
    window: int | None = None,
    num_taken: int = 0,
) -> int:
    """Returns how many tokens of a sequence the step of `builder` may compute.

    The sequence has `num_tokens` tokens, of which `start` are computed or in the step; `num_taken` are in the step.
    `window`: a token attends to at most this many positions (None: all). Returns 0 if the sequences already in the step
    use up the attention cost that is allowed for long contexts. Decodes and short contexts have no such limit.
    """
    room = max_num_batched_tokens * FULL_BUDGET_CONTEXT
    most = min(num_tokens - start, builder.budget)
    num_before = num_seen(start - num_taken, window)
    if most <= 1 or num_before + num_taken + most <= FULL_BUDGET_CONTEXT:
        return most
    spent = sum(_long_attention(num_seen(s.num_computed, window), num) for s, num in builder.num_tokens.items())
    spent -= _long_attention(num_before, num_taken)
    chunk = min(most, largest_chunk(num_before, room - spent) - num_taken)
    if num_taken:
        return max(0, chunk)
    least = min(most, LEAST_CHUNK)
    if chunk >= least:
        return chunk
    return 0 if spent else least


def largest_chunk(start: int, room: int) -> int:
    """Returns the largest n whose attention cost n x (start + n) is at most `room`; 0 if `room` is not positive."""
    return (isqrt(start * start + 4 * room) - start) // 2 if room > 0 else 0


def _long_attention(num_before: int, num_tokens: int) -> int:
    """The attention cost (chunk x context) of a chunk with a long context; 0 for decodes and short contexts."""
    context = num_before + num_tokens
    return num_tokens * context if num_tokens > 1 and context > FULL_BUDGET_CONTEXT else 0
