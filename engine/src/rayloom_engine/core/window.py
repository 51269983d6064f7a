"""Sliding windows: finds the KV blocks that can be released because no later token attends to ("sees") them.

A window of w positions means that the token at position p sees positions p - w + 1 to p. Here a model has a window only
if every layer has a window, because a layer that sees all positions needs every block. The widest window of the layers
counts.

    block       0       1       2       3        block size 4, window 6
    position    0..3    4..7    8..11   12..15
    next token at position 12 sees 7..12: block 0 can be released, block 1 cannot
"""

from __future__ import annotations

from collections.abc import Sequence


def first_seen_block(position: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the token at `position`, or any later token, sees."""
    return 0 if window is None else max(0, position + 1 - window) // block_size


def num_seen(start: int, window: int | None) -> int:
    """Returns an upper bound of the number of positions before `start` that a token at `start` or later sees."""
    return start if window is None else min(start, window)


def most_blocks(num_tokens: int, window: int | None, max_step_tokens: int, block_size: int) -> int:
    """The most blocks that a sequence of `num_tokens` holds at once, if a step computes at most `max_step_tokens`.

    The first token of a step sees the window - 1 positions before it. If these positions begin inside a block, they
    occupy one more block.
    """
    total = -(-num_tokens // block_size)
    if window is None:
        return total
    return min(total, -(-(window - 1 + max_step_tokens) // block_size) + 1)


def longest_hit(known: Sequence[object | None], window: int | None, block_size: int) -> tuple[int, int]:
    """Finds the longest prefix of a sequence that need not be computed: blocks [0, end). Returns (first, end).

    Blocks [first, end) are cached. Blocks before `first` are not needed, because no token after the prefix sees them.
    `known`: an entry for each full block of the sequence, in order: None if no block with the same content is known.
    """
    longest = (0, 0)
    run = 0  # number of consecutive known blocks up to this block
    for index, block in enumerate(known):
        run = 0 if block is None else run + 1
        first = first_seen_block((index + 1) * block_size, window, block_size)
        if index + 1 - run <= first and run:
            longest = (first, index + 1)
    return longest
