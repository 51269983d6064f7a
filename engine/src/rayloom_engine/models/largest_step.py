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
