"""Weights and activations as numpy arrays, without torch: rounding, widening and tests of their elements.

numpy has no bfloat16. An array of uint16 stands for an array of bfloat16: an element is the upper 16 bits of a float32.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
ElementType = Literal["float32", "bfloat16"]  # types that the library computes with

ELEMENTS: dict[ElementType, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}
_NAMES: dict[np.dtype[Any], ElementType] = {dtype: name for name, dtype in ELEMENTS.items()}
_COPIED_ELEMENTS = 1 << 18  # elements that `copy_elements` converts at once: their temporary copies stay in the cache
_EXPONENT = 0x7F80  # bits of a bfloat16 that are all set in an infinity and in a NaN


def element_type(array: Array) -> ElementType:
    """Returns the type of the elements: bfloat16 for uint16. Raises KeyError for other arrays."""
    return _NAMES[array.dtype]


def address(array: Array) -> int:
    """Returns the address of the first element. Raises TypeError if the array is not contiguous or cannot be written.

    Takes a third of the time of `array.ctypes.data`. The array must have at least one element.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def widened(array: Array) -> npt.NDArray[np.float32]:
    """Returns a copy in float32 of an array in float32 or bfloat16."""
    out = np.empty(array.shape, dtype=np.float32)
    copy_elements(out, array)
    return out


def rounded(number: float, dtype: ElementType) -> np.float32:
    """Returns the number rounded to a type of elements."""
    element = np.empty(1, dtype=ELEMENTS[dtype])
    copy_elements(element, np.array([number], dtype=np.float32))
    return np.float32(widened(element)[0])


def copy_elements(out: Array, values: Array) -> None:
    """Copies float32, float16 or bfloat16 numbers into an array of the same shape in float32 or bfloat16.

    Rounds to the nearest number, ties to even. A NaN stays a NaN.
    """
    assert out.shape == values.shape, (out.shape, values.shape)
    if out.dtype == values.dtype:
        out[...] = values
        return
    row_elements = max(1, values[:1].size)
    num_rows = max(1, _COPIED_ELEMENTS // row_elements)
    for start in range(0, len(values), num_rows):
        _convert(out[start : start + num_rows], values[start : start + num_rows])


def are_finite(array: Array) -> bool:
    """True if no element of an array in float32 or bfloat16 is infinite or NaN."""
    if array.dtype == ELEMENTS["bfloat16"]:
        return bool(((array & _EXPONENT) != _EXPONENT).all())
    return bool(np.isfinite(array).all())


def _convert(out: Array, values: Array) -> None:
    if out.dtype == ELEMENTS["float32"]:
        if values.dtype == ELEMENTS["bfloat16"]:
            np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[...] = values
        return
    wide = np.ascontiguousarray(values, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF  # half of the last kept bit's value, minus 1: a tie rounds up only if this bit is 1
    rounded += bits
    rounded >>= 16
    is_nan = np.isnan(wide)
    if is_nan.any():
        rounded[is_nan] = (bits[is_nan] >> 16) | 0x40  # without 0x40, the upper bits of some NaNs would be an infinity
    out[...] = rounded
