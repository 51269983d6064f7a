"""Sizes of launches that Triton kernels share."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """Rounds `number` (at least 1) up to a power of two, because Triton requires this of block sizes."""
    return 1 << (number - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    """Returns how many blocks cover `size` elements."""
    return -(-size // block)
