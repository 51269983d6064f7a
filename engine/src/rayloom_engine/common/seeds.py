"""Seeds of the choices of a request."""

from __future__ import annotations

_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice `index`, in [0, 2**63): for choice 0 `seed` itself, else splitmix64 of seed and index.

    https://prng.di.unimi.it/splitmix64.c
    """
    if index == 0:
        return seed & _MASK_63
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) & _MASK_63
