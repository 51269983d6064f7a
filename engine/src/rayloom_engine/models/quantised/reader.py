"""MatrixReader: reads one quantised matrix of a checkpoint. Each published format has a reader.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GROUP_SIZES, GroupedForm, GroupedWeights

FLOATS = ("BF16", "F16", "F32")  # types of dense weights and of scales in a file, by safetensors' names
_HELD = {"I32": np.int32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8}
_TINIEST = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header of a tensor that a checkpoint must have."""

    sizes: tuple[int, ...]
    types: tuple[str, ...] = FLOATS

    @property
    def held(self) -> np.dtype[np.generic]:
        """The type in which a loader holds the tensor: float32 for all floats, uint8 for the bits of float8."""
        return np.dtype(_HELD.get(self.types[0], np.float32))


class MatrixReader(Protocol):
    """Reads a matrix [N, K] that a format stores in several tensors NAME.suffix."""

    @property
    def unit(self) -> int:
        """Tensor parallelism cuts the inputs at multiples of this number, and K must be a multiple of it."""

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        """Returns suffix -> header of each tensor."""

    def form(self, num_inputs: int) -> GroupedForm:
        """Returns the form of `packed`."""

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        """Returns the matrix from its tensors, for the C library. Raises ValueError that says what is wrong."""

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        """Returns the matrix from its tensors, as float32 [N, K]. Raises ValueError as `packed` does."""


def library_group(stored: int | None) -> int:
    """Returns the largest group size of the C library that divides `stored`, the checkpoint's group size.

    `stored` is a multiple of 32. None means that all inputs of an output share a scale. The result is then the smallest
    group size, so that tensor parallelism can cut at any multiple of 32.
    """
    return next(size for size in GROUP_SIZES if (stored or GROUP_SIZES[-1]) % size == 0)


def centred_form(bits: int, group_size: int | None, *, has_offsets: bool) -> GroupedForm:
    """Returns the form of integers whose middle stands for the weight 0, with a factor for each output.

    `group_size`: inputs that share a scale in the checkpoint; None: all of them.
    """
    return GroupedForm(
        bits=bits,
        group_size=library_group(group_size),
        zero=1 << (bits - 1),
        has_offsets=has_offsets,
        has_factors=True,
    )


def grouped(
    form: GroupedForm,
    integers_NK: npt.NDArray[np.uint8],
    scales_NG: npt.NDArray[np.float32],
    offsets_NG: npt.NDArray[np.float32] | None = None,
) -> GroupedWeights:
    """Returns weights of a form with factors. The groups of `scales_NG` may be larger than the groups of the form.

    A row's factor is a power of two that brings the row's largest scale or offset near 1. So bfloat16 and float16
    scales stay exact if they are at least 2^-14 of the row's largest scale or offset.
    """
    assert form.has_factors and form.has_offsets == (offsets_NG is not None)
    largest_N = np.abs(scales_NG).max(axis=1)
    if offsets_NG is not None:
        largest_N = np.maximum(largest_N, np.abs(offsets_NG).max(axis=1))
    usable_N = np.where(np.isfinite(largest_N), np.maximum(largest_N, _TINIEST), np.float32(1.0))
    factors_N = np.exp2(np.floor(np.log2(usable_N))).astype(np.float32)
    repeats = integers_NK.shape[1] // scales_NG.shape[1] // form.group_size

    def halves(values_NG: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        halved_NG: npt.NDArray[np.float16] = (values_NG / factors_N[:, None]).astype(np.float16)
        return halved_NG.repeat(repeats, axis=1)

    return GroupedWeights(
        form=form,
        integers_NK=integers_NK,
        scales_NG=halves(scales_NG),
        offsets_NG=None if offsets_NG is None else halves(offsets_NG),
        factors_N=factors_N,
    )


def nibbles(words: Array, bits: int = 4) -> npt.NDArray[np.uint8]:
    """Returns [..., 32 / bits] integers of `bits` bits from int32 [...], the integer in the lowest bits first."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    as_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    out = np.empty((*words.shape, 8), dtype=np.uint8)
    np.bitwise_and(as_bytes, 15, out=out[..., 0::2])
    np.right_shift(as_bytes, 4, out=out[..., 1::2])
    return out
