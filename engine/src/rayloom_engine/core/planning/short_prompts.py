"""Short prompts: while a long prompt is computed, a part of each step is kept for prompts that are much shorter.

Prompts are computed in the order in which they arrived. Without this rule, a prompt of which 32 tokens are left would
wait until a prompt of 2,000 tokens before it is complete. With it, the short prompt waits a few steps, and the long one
gets at least half of the tokens of each step. So the long prompt takes at most twice as long, however many short ones
arrive. Shortest-first without a bound would give lower mean times to the first token, but a long prompt could starve.
"""

from __future__ import annotations

from dataclasses import dataclass

# A prompt is short beside another of which this many times as many tokens are left.
_TIMES_SHORTER = 4


@dataclass(frozen=True, slots=True)
class ShortPrompts:
    """What short prompts get of a step."""

    most_left: int  # a prompt is short if at most this many of its tokens are left to compute
    num_tokens: int  # tokens of the step that are kept for short prompts


def kept_for_short_prompts(num_left: int, num_prompt_tokens: int) -> ShortPrompts | None:
    """Returns what short prompts get of a step that can compute `num_prompt_tokens` tokens of prompts.

    `num_left`: tokens left of the prompt that comes first. Returns None if no prompt is short beside it, if this step
    completes it, or if the step has too few tokens for two prompts.
    """
    most_left = num_left // _TIMES_SHORTER
    num_tokens = num_prompt_tokens // 2
    if num_left <= num_prompt_tokens or not most_left or not num_tokens:
        return None
    return ShortPrompts(most_left, num_tokens)
