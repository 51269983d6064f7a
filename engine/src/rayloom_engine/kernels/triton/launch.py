"""Sizes of launches that Triton kernels share."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least the positive `number`. Block sizes must be powers of two."""
    return 1 << (number - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    """Returns how many blocks cover `size` elements."""
    return -(-size // block)
