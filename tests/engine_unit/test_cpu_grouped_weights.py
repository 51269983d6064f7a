"""Grouped weights in the C library: products, rows, and results that do not depend on the batch.

test_quantised_models.py tests checkpoints whose weights have this form.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights, MatrixVectors, common_form, stacked
from rayloom_engine.cpu_library.library import CpuLibrary, grouped_linear_of
from rt_library import ISAS, open_library, to_numpy, to_torch, type_name

DTYPES = (torch.float32, torch.bfloat16)


def form_of(bits: int, group_size: int, has_offsets: bool = False) -> GroupedForm:
    """A form with unsigned integers whose middle stands for the weight 0. Weights with offsets also have factors."""
    return GroupedForm(
        bits=bits, group_size=group_size, zero=1 << bits - 1, has_offsets=has_offsets, has_factors=has_offsets
    )


FLOATS = GroupedForm(bits=4, group_size=32, zero=12, has_factors=True, are_floats=True)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # the floats with a positive sign
EXACT_FORMS = [
    *(form_of(bits, size, has_offsets) for bits in (4, 8) for size in (32, 64, 128) for has_offsets in (False, True)),
    FLOATS,
]
SIXES = form_of(6, 16)
FORMS = [*EXACT_FORMS, SIXES]
FOURS = form_of(4, 64, has_offsets=True)
EIGHTS = form_of(8, 64, has_offsets=True)
NUM_INPUTS = 384
_X_GROUP = 32  # number of inputs that share a scale of the activations


def name_of(form: GroupedForm) -> str:
    return (
        f"{form.bits}{'-floats' if form.are_floats else ''}-{form.group_size}{'-offsets' if form.has_offsets else ''}"
    )


def random_weights(num_outputs: int, form: GroupedForm) -> GroupedWeights:
    random = np.random.default_rng(form.bits * form.group_size + form.has_offsets)
    num_groups = NUM_INPUTS // form.group_size
    integers = random.integers(0, 1 << form.bits, (num_outputs, NUM_INPUTS), dtype=np.uint8)
    integers[0] = 7 if form.are_floats else (1 << form.bits) - 1  # the largest sums
    scales = (random.random((num_outputs, num_groups)) / (1 << form.bits)).astype(np.float16)
    scales[-1, -1] = 3e-7  # below the normal numbers of float16
    return GroupedWeights(
        form=form,
        integers_NK=integers,
        scales_NG=scales,
        offsets_NG=random.standard_normal((num_outputs, num_groups)).astype(np.float16) if form.has_offsets else None,
        factors_N=random.random(num_outputs).astype(np.float32) if form.has_factors else None,
    )


def dequantised(weights: GroupedWeights) -> npt.NDArray[np.float64]:
    form = weights.form
    scales = weights.scales_NG.astype(np.float64).repeat(form.group_size, axis=1)
    if form.are_floats:
        plain = scales * 2 * np.concatenate([E2M1, -E2M1])[weights.integers_NK]
    else:
        plain = scales * (weights.integers_NK.astype(np.float64) - form.zero)
    if weights.offsets_NG is not None:
        plain += weights.offsets_NG.astype(np.float64).repeat(form.group_size, axis=1)
    if weights.factors_N is not None:
        plain *= weights.factors_N.astype(np.float64)[:, None]
    return plain


def quantised_rows(x: torch.Tensor) -> npt.NDArray[np.float64]:
    """The activations as used in products: integers of at most 127, times a scale for each 32 inputs."""
    grouped = x.float().reshape(len(x), -1, _X_GROUP)
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)
    integers = (grouped * inverse).round()
    return (integers.double() * (largest / 127).double()).reshape(x.shape).numpy()


def multiply(library: CpuLibrary, weights: GroupedWeights, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    packed = library.pack_grouped(weights)
    vectors = MatrixVectors(None if bias is None else bias.numpy(), weights.factors_N)
    linear = grouped_linear_of(packed, weights.form, weights.integers_NK.shape, vectors)
    operand = x.to(getattr(torch, library.operand_dtype(type_name(x.dtype))))
    return to_torch(library.multiply(type_name(x.dtype), linear, to_numpy(operand)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_product_is_that_of_exact_sums_of_integers(form: GroupedForm, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    library = open_library(isa)
    for num_outputs, has_bias in ((16, False), (72, True), (250, True)):
        weights = random_weights(num_outputs, form)
        bias = torch.randn(num_outputs) if has_bias else None
        for num_rows in (1, 2, 7, 65):
            x = torch.randn(num_rows, NUM_INPUTS).to(dtype)
            x[0, :_X_GROUP] = 0
            x[-1, _X_GROUP:] = -1  # -127, times the largest weights
            expected = quantised_rows(x) @ dequantised(weights).T
            if bias is not None:
                expected += bias.numpy()
            ours = multiply(library, weights, x, bias).numpy()
            np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_row_of_a_product_does_not_depend_on_the_others(form: GroupedForm, isa: str) -> None:
    torch.manual_seed(0)
    library = open_library(isa)
    weights = random_weights(200, form)
    x = torch.randn(33, NUM_INPUTS).bfloat16()
    alone = torch.cat([multiply(library, weights, row, None) for row in x.split(1)])
    for first, end in ((0, 33), (5, 8), (20, 32)):
        assert torch.equal(multiply(library, weights, x[first:end], None), alone[first:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_rows_of_a_grouped_matrix_can_be_looked_up(form: GroupedForm, isa: str) -> None:
    library = open_library(isa)
    weights = random_weights(37, form)
    packed = library.pack_grouped(weights)
    vectors = MatrixVectors(None, weights.factors_N)
    matrix = grouped_linear_of(packed, weights.form, weights.integers_NK.shape, vectors)
    rows = library.embed("bfloat16", matrix, np.array([36, 0, -1, 17]))
    plain = dequantised(weights)
    expected = np.stack([plain[36], plain[0], np.zeros(NUM_INPUTS), plain[17]])
    np.testing.assert_allclose(rows, expected, atol=1e-6, rtol=3e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [FOURS, FLOATS, SIXES, EIGHTS], ids=name_of)
def test_a_value_that_is_not_finite_reaches_the_product(form: GroupedForm, isa: str) -> None:
    library = open_library(isa)
    weights = random_weights(40, form)
    x = torch.randn(2, NUM_INPUTS)
    x[1, 100] = float("inf")
    weights.scales_NG[3, 2] = np.nan
    ours = multiply(library, weights, x, None)
    assert ours[1].isnan().all()
    assert ours[0].isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("has_offsets", [False, True])
def test_parts_of_a_matrix_are_cut_between_groups_and_stacked(has_offsets: bool) -> None:
    weights = random_weights(40, form_of(4, 64, has_offsets))
    plain = dequantised(weights)
    np.testing.assert_allclose(weights.plain(), plain, atol=1e-6)
    parts = [weights.part(slice(first, end), slice(64, 256)) for first, end in ((0, 8), (24, 40))]
    expected = np.concatenate([plain[:8, 64:256], plain[24:, 64:256]])
    np.testing.assert_allclose(stacked(parts).plain(), expected, atol=1e-6)
    with pytest.raises(AssertionError):
        weights.part(slice(None), slice(32, 256))


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_matrix_takes_the_bytes_of_its_form(form: GroupedForm) -> None:
    weights = random_weights(48, form)
    size, has_offsets = form.group_size, form.has_offsets
    halves = 2 * 48 * (NUM_INPUTS // size) * (1 + has_offsets)
    expected = 48 * NUM_INPUTS * form.bits // 8 + halves
    # Without offsets a chunk has two groups. If the number of groups is odd, the second half of the last chunk is
    # empty.
    empty = 48 * (size * form.bits // 8 + 2) if size == 128 and not has_offsets else 0
    assert open_library(ISAS[0]).pack_grouped(weights).nbytes == expected + empty
    assert weights.form.num_bytes(48, NUM_INPUTS) == expected + empty + 4 * 48 * form.has_factors


@pytest.mark.parametrize("others", [form_of(4, 32), form_of(4, 128, has_offsets=True)], ids=name_of)
@pytest.mark.parametrize("form", EXACT_FORMS, ids=name_of)
def test_matrices_of_several_forms_have_the_same_weights_when_they_are_stacked(
    form: GroupedForm, others: GroupedForm
) -> None:
    parts = [random_weights(20, form), random_weights(30, others)]
    common = common_form([part.form for part in parts])
    ours = stacked([part.in_form(common) for part in parts])
    if form == others:
        assert common == parts[0].form
    else:
        assert (common.bits, common.group_size) == (8, min(form.group_size, others.group_size))
    np.testing.assert_array_equal(dequantised(ours), np.concatenate([dequantised(part) for part in parts]))


def test_weights_of_6_bits_are_rounded_to_8_bits_when_they_are_stacked_with_others() -> None:
    parts = [random_weights(20, SIXES), random_weights(30, form_of(4, 32, has_offsets=True))]
    common = common_form([part.form for part in parts])
    assert (common.bits, common.group_size) == (8, 32)
    rounded, kept = (dequantised(part.in_form(common)) for part in parts)
    np.testing.assert_array_equal(kept, dequantised(parts[1]))
    plain = dequantised(parts[0]).reshape(20, -1, 32)
    # Half a step of 1/127 of the largest weight, and the rounding of the scale to float16.
    bound = np.abs(plain).max(axis=2, keepdims=True) * (1 / 254 + 2**-11)
    assert (np.abs(rounded.reshape(plain.shape) - plain) <= bound).all()


def test_an_integer_that_does_not_fit_into_the_common_form_is_refused() -> None:
    weights = random_weights(20, form_of(8, 32))
    other = GroupedWeights(
        form=dataclasses.replace(weights.form, zero=0), integers_NK=weights.integers_NK, scales_NG=weights.scales_NG
    )
    with pytest.raises(ValueError, match="outside of 0 to 255"):
        other.in_form(common_form([weights.form, other.form]))
