"""The sizes and the bytes of a rank's largest step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The sizes of a rank's largest step."""

    num_tokens: int
    num_rows: int  # rows whose logits are computed
    context_len: int  # positions of the longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of a rank's largest step, without weights and KV cache."""

    usual: int  # arrays of tokens and logits, which each step of this size has
    # with the buffers that only some steps have: results of attention over a long context, and many rows of logits
    most: int


def held_bytes(step: LargestStep, *, hidden_size: int, vocab_size: int) -> int:
    """Returns the bytes of a step's hidden states and logits in float32. They live until the step's result is made."""
    return 4 * (step.num_tokens * hidden_size + step.num_rows * (hidden_size + vocab_size))


def with_draft_model(target: StepBytes, draft: StepBytes, held: int) -> StepBytes:
    """Returns the bytes of a step in which a draft model computes after the target model.

    `held`: `held_bytes` of the target model. The models share the memory of their other buffers, because they compute
    one after the other.
    """
    return StepBytes(usual=max(target.usual, draft.usual) + held, most=max(target.most, draft.most) + held)
