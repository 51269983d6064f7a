"""Short prompts: while a long prompt is computed, a part of each step is kept for prompts that are much shorter.

Prompts are computed in the order in which they arrived. Without this rule, a prompt of which 32 tokens are left would
wait until a prompt of 2,000 tokens before it is complete. With it, the short prompt waits a few steps, and the long one
gets in each step at least half of the tokens that it would get alone. Shortest-first without a bound would give lower
mean times to the first token, but a long prompt could starve.
"""

from __future__ import annotations

from dataclasses import dataclass

# A prompt is short beside another of which this many times as many tokens are left.
_TIMES_SHORTER = 4


@dataclass(frozen=True, slots=True)
class ShortPrompts:
    """The part of a step that is kept for short prompts."""

    most_left: int  # a prompt is short if at most this many of its tokens are left to compute
    num_tokens: int  # tokens of the step that are kept for short prompts


def kept_for_short_prompts(num_left: int, num_alone: int) -> ShortPrompts | None:
    """Returns what short prompts get of a step in which the first prompt would get `num_alone` tokens without them.

    `num_left`: tokens left of the first prompt. Returns None if no prompt is short beside it, if this step completes
    it, or if the step has too few tokens for two prompts.
    """
    most_left = num_left // _TIMES_SHORTER
    num_tokens = num_alone // 2
    if num_left <= num_alone or not most_left or not num_tokens:
        return None
    return ShortPrompts(most_left, num_tokens)
