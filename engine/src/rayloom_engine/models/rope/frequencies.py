"""The formulas of rotary embedding: the frequencies of a head's pairs, and the factor of their cosines and sines.

Torch and the C library use the same functions, which need numpy, but not torch. Powers are computed in float64 and
rounded to float32. The rest is computed in float32, as in transformers. A frequency may differ from that of
transformers in its last bits.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rayloom_engine.models.rope.parameters import RopeParameters

FloatArray = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> FloatArray:
    """Returns the radians per position for each rotated pair of a head: float32, fastest first.

    "linear" divides all frequencies by the factor. "dynamic" (NTK) enlarges theta if the served context is longer than
    the trained context. This lowers mainly the slow frequencies. "yarn" (Peng et al. 2023, arXiv:2309.00071) and
    "llama3" keep the frequencies that make many turns within the trained context. They divide the frequencies that make
    few turns by the factor, and take a weighted mean for the frequencies in between. "longrope" (Ding et al. 2024,
    arXiv:2402.13753) divides each frequency by a number from the checkpoint. The number is one of the long factors if
    the served context is longer than the trained context, else one of the short factors. "proportional" rotates only
    the fastest pairs.
    """
    dim = rope.rotary_dim(head_dim)
    if rope.kind == "dynamic":
        return _inverse(_powers(_dynamic_theta(rope, dim), dim))
    powers = _powers(rope.theta, dim)
    if rope.kind == "longrope":
        is_long = rope.context_len > rope.original_max_position
        return _inverse(np.array(rope.long_factors if is_long else rope.short_factors, dtype=np.float32) * powers)
    frequencies = _inverse(powers)
    match rope.kind:
        case "linear":
            return frequencies / np.float32(rope.factor)
        case "llama3":
            return _blend(frequencies, frequencies / np.float32(rope.factor), _llama3_share(rope, frequencies))
        case "yarn":
            return _blend(frequencies, _inverse(np.float32(rope.factor) * powers), _yarn_share(rope, dim))
        case "proportional":
            frequencies[int(rope.rotated_share * dim // 2) :] = 0.0
            return frequencies / np.float32(rope.factor)
    return frequencies


def attention_scale(rope: RopeParameters) -> float:
    """Returns the factor of all cosines and sines. Its square is a factor of the attention scores."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1.0 and rope.original_max_position > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    return 1.0


def _powers(theta: float, dim: int) -> FloatArray:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _inverse(values: FloatArray) -> FloatArray:
    inverse: FloatArray = np.float32(1.0) / values
    return inverse


def _blend(kept: FloatArray, scaled: FloatArray, share: FloatArray) -> FloatArray:
    """Returns the weighted mean of two frequencies. `share`: the weight of `kept`, for each pair."""
    return ((np.float32(1.0) - share) * scaled + share * kept).astype(np.float32, copy=False)


def _dynamic_theta(rope: RopeParameters, dim: int) -> float:
    stretch = max(rope.context_len, rope.original_max_position) / rope.original_max_position
    return (
        float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2))) if dim > 2 else rope.theta
    )


def _llama3_share(rope: RopeParameters, frequencies: FloatArray) -> FloatArray:
    turns = np.float32(rope.original_max_position) * frequencies / np.float32(2 * math.pi)  # in the trained context
    width = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    share: FloatArray = ((turns - np.float32(rope.low_freq_factor)) / width).clip(0.0, 1.0)
    return share


def _yarn_share(rope: RopeParameters, dim: int) -> FloatArray:
    """Returns the weight of each pair's unscaled frequency: 1 up to pair `low`, 0 from pair `high` on, else between."""

    def pair_of(turns: float) -> float:  # the pair that makes this many turns within the trained context
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # no division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    return np.float32(1.0) - ramp.clip(0.0, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
