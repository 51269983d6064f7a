"""Grouped weights: small integers. In the weights of one output, each group of neighbouring inputs shares a scale.

csrc/cpu/grouped.h multiplies by grouped weights.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.structures import GroupsStruct

GROUP_SIZES = (128, 64, 32)  # the sizes for which the library has kernels
_HALF_BYTES = 2
_FACTOR_BYTES = 4
_LARGEST = 255  # the largest integer of 8 bits
_MIDDLE = 128
FLOAT_ZERO = 12  # `zero` of floats
_FLOAT_CODE = 1  # RL_FLOATS in the C header

# The integer that stands for each float of 4 bits (e2m1): twice the float, plus 12. The floats are 0, 0.5, 1, 1.5, 2,
# 3, 4, 6 and their negatives. csrc/cpu/grouped_layout.h has the same table.
FLOAT_INTEGERS = np.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=np.uint8)

RowPart = slice | npt.NDArray[np.intp]  # a slice of rows, or the indices of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedForm:
    """Describes how grouped weights are stored. Two matrices of one form can be stacked.

    `zero`: the integer that stands for the weight 0, before an offset is added. With 6 bits it is 32, a group has 16
    inputs, and there are no offsets. `are_floats`: the 4 bits of a weight are a float, and FLOAT_INTEGERS has the
    integer that stands for it; `zero` is FLOAT_ZERO.
    """

    bits: int  # 4, 6 or 8
    group_size: int  # 16, or one of GROUP_SIZES
    zero: int
    has_offsets: bool = False
    has_factors: bool = False
    are_floats: bool = False

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Returns the bytes of a matrix, without rows of padding. num_inputs is a multiple of the group size."""
        num_groups = num_inputs // self.group_size
        if not self.has_offsets:
            num_groups += num_groups % 2  # a chunk has two groups: csrc/cpu/grouped_layout.h
        group_bytes = self.group_size * self.bits // 8 + _HALF_BYTES * (1 + self.has_offsets)
        return num_outputs * (num_groups * group_bytes + _FACTOR_BYTES * self.has_factors)


def common_form(forms: Collection[GroupedForm]) -> GroupedForm:
    """Returns the form for a stack of matrices: their own form if all have the same, else a form of 8 bits."""
    first, *others = forms
    if all(form == first for form in others):
        return first
    return GroupedForm(
        bits=8,
        group_size=max(GROUP_SIZES[-1], min(form.group_size for form in forms)),
        zero=_MIDDLE,
        has_offsets=any(form.has_offsets for form in forms),
        has_factors=any(form.has_factors for form in forms),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeights:
    """A matrix [N, K] of grouped weights.

    weight[n, k] = factors[n] * (scales[n, g] * (integers[n, k] - zero) + offsets[n, g]),  g = k // group_size

    If the weights are floats, FLOAT_INTEGERS[integers[n, k]] takes the place of integers[n, k].
    """

    form: GroupedForm
    integers_NK: npt.NDArray[np.uint8]  # below 2 ** bits; of floats, their bits
    scales_NG: npt.NDArray[np.float16]
    offsets_NG: npt.NDArray[np.float16] | None = None
    factors_N: npt.NDArray[np.float32] | None = None

    @property
    def _multiplied_NK(self) -> npt.NDArray[np.uint8]:
        """The integers that are multiplied by a scale, before `zero` is subtracted."""
        return FLOAT_INTEGERS[self.integers_NK] if self.form.are_floats else self.integers_NK

    def plain(self) -> npt.NDArray[np.float32]:
        """Returns the weights as float32 [N, K]."""
        form = self.form
        num_outputs = len(self.integers_NK)
        integers_NGk = self._multiplied_NK.reshape(num_outputs, -1, form.group_size).astype(np.float32)
        plain_NGk = (integers_NGk - np.float32(form.zero)) * self.scales_NG.astype(np.float32)[:, :, None]
        if self.offsets_NG is not None:
            plain_NGk += self.offsets_NG.astype(np.float32)[:, :, None]
        if self.factors_N is not None:
            plain_NGk *= self.factors_N[:, None, None]
        return plain_NGk.reshape(num_outputs, -1)

    def part(self, rows: RowPart, columns: slice) -> GroupedWeights:
        """Returns the weights of some rows and columns. `columns` begins and ends between two groups."""
        size = self.form.group_size
        first, end, _ = columns.indices(self.integers_NK.shape[1])
        assert first % size == 0 and end % size == 0, (columns, size)
        groups = slice(first // size, end // size)
        return GroupedWeights(
            form=self.form,
            integers_NK=self.integers_NK[rows, columns],
            scales_NG=self.scales_NG[rows, groups],
            offsets_NG=None if self.offsets_NG is None else self.offsets_NG[rows, groups],
            factors_N=None if self.factors_N is None else self.factors_N[rows],
        )

    def in_form(self, form: GroupedForm) -> GroupedWeights:
        """Returns the weights in a form of `common_form`. Raises ValueError for an integer that does not fit.

        Weights of groups that are smaller than the form's are rounded to 8 bits. All others stay the same.
        """
        if form == self.form:
            return self
        if self.form.group_size < form.group_size:
            return rounded_to_bytes(self.plain()).in_form(form)
        integers_NK = self._multiplied_NK.astype(np.int16) + (form.zero - self.form.zero)
        if integers_NK.size and (integers_NK.min() < 0 or integers_NK.max() > _LARGEST):
            raise ValueError(f"an integer of the weights is outside of 0 to {_LARGEST} when {form.zero} stands for 0")
        repeats = self.form.group_size // form.group_size
        scales_NG = self.scales_NG.repeat(repeats, axis=1)
        offsets_NG = factors_N = None
        if form.has_offsets:
            offsets_NG = (
                np.zeros_like(scales_NG) if self.offsets_NG is None else self.offsets_NG.repeat(repeats, axis=1)
            )
        if form.has_factors:
            factors_N = np.ones(len(scales_NG), np.float32) if self.factors_N is None else self.factors_N
        return GroupedWeights(
            form=form,
            integers_NK=integers_NK.astype(np.uint8),
            scales_NG=scales_NG,
            offsets_NG=offsets_NG,
            factors_N=factors_N,
        )


_BYTES = GroupedForm(bits=8, group_size=32, zero=_MIDDLE, has_factors=True)


def rounded_to_bytes_form() -> GroupedForm:
    """Returns the form of the weights that `rounded_to_bytes` returns."""
    return _BYTES


def rounded_to_bytes(plain_NK: npt.NDArray[np.float32]) -> GroupedWeights:
    """Returns weights rounded to 8 bits, with a scale for each group of 32 inputs.

    The error is at most 1/254 of the largest weight of the group. A weight that is not finite makes all weights of its
    group not finite.
    """
    num_outputs, num_inputs = plain_NK.shape
    plain_NGk = plain_NK.reshape(num_outputs, -1, _BYTES.group_size)
    scales_NG = np.abs(plain_NGk).max(axis=2) / np.float32(127)
    factors_N = scales_NG.max(axis=1)
    factors_N = np.where(factors_N > 0, factors_N, np.float32(1))
    halves_NG = (scales_NG / factors_N[:, None]).astype(np.float16)
    steps_NG = halves_NG.astype(np.float32) * factors_N[:, None]
    with np.errstate(invalid="ignore"):
        integers_NGk = np.rint(plain_NGk / np.where(steps_NG > 0, steps_NG, np.float32(1))[:, :, None])
        integers_NGk = np.nan_to_num(np.clip(integers_NGk, -127, 127)) + 128
    return GroupedWeights(
        form=_BYTES,
        integers_NK=integers_NGk.astype(np.uint8).reshape(num_outputs, num_inputs),
        scales_NG=halves_NG,
        factors_N=factors_N,
    )


class MatrixVectors(NamedTuple):
    """The float32 vectors [N] of a packed matrix."""

    bias_N: npt.NDArray[np.float32] | None
    scales_N: npt.NDArray[np.float32] | None = None  # the factors of grouped weights


def stacked(parts: list[GroupedWeights]) -> GroupedWeights:
    """Returns one matrix with the rows of all parts. The parts must have the same form."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    assert all(part.form == first.form for part in parts), [part.form for part in parts]
    offsets = [part.offsets_NG for part in parts if part.offsets_NG is not None]
    factors = [part.factors_N for part in parts if part.factors_N is not None]
    return GroupedWeights(
        form=first.form,
        integers_NK=np.concatenate([part.integers_NK for part in parts]),
        scales_NG=np.concatenate([part.scales_NG for part in parts]),
        offsets_NG=np.concatenate(offsets) if offsets else None,
        factors_N=np.concatenate(factors) if factors else None,
    )


def groups_of(form: GroupedForm) -> GroupsStruct:
    """Returns the form as a structure of the library."""
    return GroupsStruct(
        bits=form.bits,
        size=form.group_size,
        zero=form.zero,
        has_offsets=form.has_offsets,
        numbers=_FLOAT_CODE if form.are_floats else 0,
    )
