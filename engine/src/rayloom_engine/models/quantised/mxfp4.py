"""mxfp4 checkpoints (`quant_method: mxfp4`): floats of 4 bits, e2m1, in blocks of 32 inputs that share a power of two.

    weight[n, k] = 2 ** (scales[n, k // 32] - 127) * float(blocks[n, k // 32, k % 32 // 2])

A byte of `blocks` [N, K / 32, 16] has two floats, the one of the lower input in its low half. `scales` [N, K / 32] has
exponents, where 255 means NaN (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import FLOAT_INTEGERS, FLOAT_ZERO, GroupedForm, GroupedWeights
from rayloom_engine.models.quantised.reader import StoredTensor

_BLOCK = 32  # inputs
_BIAS = 127  # of an exponent
_NAN = 255
_HIGHEST_SCALE = 15  # exponent of the largest power of two in float16
_FORM = GroupedForm(bits=4, group_size=_BLOCK, zero=FLOAT_ZERO, has_factors=True, are_floats=True)
_FLOATS = ((FLOAT_INTEGERS.astype(np.float32) - FLOAT_ZERO) / 2).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Mxfp4Reader:
    """Implements MatrixReader."""

    @property
    def unit(self) -> int:
        return _BLOCK

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        num_blocks = num_inputs // _BLOCK
        return {
            "blocks": StoredTensor((num_outputs, num_blocks, _BLOCK // 2), ("U8",)),
            "scales": StoredTensor((num_outputs, num_blocks), ("U8",)),
        }

    def form(self, num_inputs: int) -> GroupedForm:
        return _FORM

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        """Returns the matrix. A row's factor is a power of two that makes its largest scale that of float16.

        So a scale is exact if it is at least 2 ** -39 of the row's largest. A smaller scale is rounded to 0.
        """
        exponents_NG = _exponents(tensors)
        highest_N = exponents_NG.max(axis=1)
        powers_NG = exponents_NG - highest_N[:, None] + _HIGHEST_SCALE
        # 1 is subtracted because the integers are twice the floats.
        factors_N = np.ldexp(np.float32(1), highest_N - (_BIAS + _HIGHEST_SCALE + 1))
        return GroupedWeights(
            form=_FORM,
            integers_NK=_bits(tensors["blocks"]),
            scales_NG=np.ldexp(np.float32(1), powers_NG).astype(np.float16),
            factors_N=factors_N,
        )

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        exponents_NG = _exponents(tensors) - _BIAS
        floats_NK: npt.NDArray[np.float32] = _FLOATS[_bits(tensors["blocks"])]
        blocks_NGk = floats_NK.reshape(*exponents_NG.shape, _BLOCK)
        np.ldexp(blocks_NGk, exponents_NG[:, :, None], out=blocks_NGk)
        return floats_NK


def _exponents(tensors: Mapping[str, Array]) -> npt.NDArray[np.int32]:
    """Returns the stored exponents. Raises ValueError for a NaN."""
    exponents_NG = tensors["scales"].astype(np.int32)
    if (exponents_NG == _NAN).any():
        row, block = (int(index) for index in np.argwhere(exponents_NG == _NAN)[0])
        raise ValueError(f"scales[{row}, {block}] is {_NAN}, which means NaN; works: 0 to {_NAN - 1}")
    return exponents_NG


def _bits(blocks_NGb: Array) -> npt.NDArray[np.uint8]:
    """Returns the 4 bits of each weight, in a byte each, as [N, K]."""
    bits = np.empty((*blocks_NGb.shape, 2), dtype=np.uint8)
    np.bitwise_and(blocks_NGb, 15, out=bits[..., 0])
    np.right_shift(blocks_NGb, 4, out=bits[..., 1])
    return bits.reshape(len(blocks_NGb), -1)
