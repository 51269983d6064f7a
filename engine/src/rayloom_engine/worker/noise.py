"""GumbelNoise: random numbers that depend on seed, position and token id, and on nothing else.

The generator is counter-based: it hashes integers to random-looking integers, and keeps no state between calls. A
replayed request therefore draws the same numbers again, in any batch. The hash is the finaliser of SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014), in 64-bit arithmetic that wraps around.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Returns SplitMix64's finaliser of `value` modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def noise_key(seed: int, position: int) -> int:
    """Returns a 64-bit key for the token at `position` of a sequence with `seed`."""
    return mix(mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)


class GumbelNoise:
    """Standard Gumbel noise for every token id, with which argmax(logits + noise) samples from softmax(logits)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # Multiples of an odd golden-ratio constant: the sequence that SplitMix64 itself uses, one step per token id.
        steps_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
        self._steps_V = steps_V * _signed(_GOLDEN)

    def __call__(self, seed: int, position: int, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 noise for all token ids, shape [V], or for `token_ids`, shape [K]."""
        steps = self._steps_V if token_ids is None else self._steps_V[token_ids]
        bits = steps + _signed(noise_key(seed, position))
        bits = (bits ^ _shift(bits, 30)).mul_(_signed(_MIX_1))
        bits = (bits ^ _shift(bits, 27)).mul_(_signed(_MIX_2))
        bits = bits ^ _shift(bits, 31)
        # 52 bits plus one half fit a float64 exactly. The result is in (0, 1), never 0 or 1, so both logarithms are
        # finite.
        uniform = (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
        return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _signed(value: int) -> int:
    """Returns the same 64 bits as a signed integer, because torch cannot multiply unsigned integers."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift right. (torch's operator >> is an arithmetic shift: it keeps the sign.)"""
    return (bits >> by) & ((1 << (64 - by)) - 1)
