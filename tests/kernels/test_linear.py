"""The product of one row, and the product with a gated activation, against their references.

The cases have sizes that are no multiple of a program's, a slice of a longer row, and matrices that no kernel can read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.kernels.gated_linear import choose_gated_linear, triton_gpu
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.linear import choose_linear, reference
from rayloom_engine.kernels.linear import triton_gpu as triton_linear
from rayloom_engine.kernels.silu_mul import reference as reference_silu
from rayloom_engine.kernels.silu_mul import triton_gpu as triton_silu
from rayloom_engine.kernels.triton.choice import is_interpreted
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.shape import read_shape
from rt_tiny import tiny_variant
from rt_triton import DTYPES, assert_near, randn, target

SEEDS = st.integers(0, 2**32)
# The interpreter truncates bfloat16 instead of rounding it, which counts as two roundings. A sum of 1,000 products in
# float32 has itself some roundings of float32.
ROUNDINGS = {torch.float32: 64, torch.float16: 2, torch.bfloat16: 4 if is_interpreted() else 2}
INPUTS = st.sampled_from([16, 48, 64, 240, 256, 272, 576, 1040])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched."""
    found: list[str] = []
    for module, name in ((triton_linear, "one_row_kernel"), (triton_gpu, "gated_row_kernel")):
        kernel = getattr(module, name)

        class Recording:
            def __getitem__(self, grid: tuple[int, ...], name: str = name, kernel: object = kernel) -> object:
                found.append(name)
                return kernel[grid]  # type: ignore[index]

        monkeypatch.setattr(module, name, Recording())
    return found


@settings(max_examples=20, deadline=None)
@given(
    inputs=INPUTS, outputs=st.sampled_from([8, 24, 136]), dtype=st.sampled_from(DTYPES), bias=st.booleans(), seed=SEEDS
)
def test_the_product_of_one_row_is_its_reference(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    x = randn(1, inputs, seed=seed, dtype=dtype)
    weight = randn(outputs, inputs, seed=seed + 1, scale=0.1, dtype=dtype)
    addend = randn(outputs, seed=seed + 2, dtype=dtype) if bias else None
    assert triton_linear.fits(x, weight)
    found = triton_linear.multiply(x, weight, addend)
    assert found.shape == (1, outputs) and found.dtype == dtype
    assert_near(found, reference.KERNEL.multiply(x, weight, addend), steps=ROUNDINGS[dtype])


@settings(max_examples=10, deadline=None)
@given(inputs=INPUTS, half=st.sampled_from([4, 8, 136]), dtype=st.sampled_from(DTYPES), seed=SEEDS)
def test_the_gated_product_of_one_row_is_the_activation_of_the_product(
    inputs: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    x = randn(1, inputs, seed=seed, dtype=dtype)
    weight = randn(2 * half, inputs, seed=seed + 1, scale=0.1, dtype=dtype)
    found = triton_gpu.gated_linear(x, weight)
    assert found.shape == (1, half) and found.dtype == dtype
    # gate and up are rounded as if they had been stored. A rounding the other way, of a sum in another order, changes
    # the result by some roundings, and the interpreter truncates.
    stored = triton_silu.silu_mul(triton_linear.multiply(x, weight, None))
    assert torch.equal(found, stored) or dtype is torch.float32
    assert_near(found, stored, steps=8)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(0, 16, 64), (2, 16, 64), (17, 16, 64), (1, 12, 64), (1, 16, 20)]
)
def test_products_that_the_kernels_cannot_compute_are_computed_by_torch(
    rows: int, outputs: int, inputs: int, launched: list[str]
) -> None:
    x, weight = randn(rows, inputs, seed=1), randn(outputs, inputs, seed=2)
    bias = randn(outputs, seed=3)
    product = choose_linear(target("triton")).multiply
    assert_near(product(x, weight, bias), reference.KERNEL.multiply(x, weight, bias), steps=64, scale=4.0)
    gated = choose_gated_linear(target("triton"))
    assert gated is not None
    expected = reference_silu.silu_mul(reference.KERNEL.multiply(x, weight, None))
    assert_near(gated(x, weight), expected, steps=256, scale=4.0)
    assert not launched


@pytest.mark.parametrize("kind", ["strided row", "strided matrix", "other type"])
def test_rows_and_matrices_that_are_not_contiguous_or_of_two_types_do_not_fit(kind: str) -> None:
    x, weight = randn(1, 64, seed=1), randn(24, 64, seed=2)
    assert triton_linear.fits(x, weight)
    if kind == "strided row":
        x = randn(1, 128, seed=1)[:, ::2]
    elif kind == "strided matrix":
        weight = randn(24, 128, seed=2)[:, ::2]
    else:
        weight = weight.half()
    assert not triton_linear.fits(x, weight)


def test_the_mlp_of_a_model_activates_in_the_product_of_one_row_until_adapters_change_it(
    launched: list[str], tmp_path: Path
) -> None:
    folder = tiny_variant(tmp_path, "llama")
    model = load_model(folder, read_shape(folder), choose_kernels(target("triton")), dtype=torch.float32).model
    assert isinstance(model, CausalLM)
    mlp = model._weights.layers[0].mlp
    x = randn(2, model.shape.hidden_size, seed=1)
    together = mlp(x)
    assert not launched
    assert_near(mlp(x[:1]), together[:1], steps=256)
    assert launched == ["gated_row_kernel", "one_row_kernel"]
    mlp.gate_up.replace_product(lambda product: lambda rows: 2.0 * product(rows))
    launched.clear()
    mlp(x[:1])
    assert launched == ["one_row_kernel"] * 2


def test_the_row_of_a_step_is_read_where_it_is_and_nothing_behind_it(launched: list[str]) -> None:
    rows = randn(3, 64, seed=1)
    rows[0], rows[2] = float("nan"), float("nan")
    weight = randn(24, 64, seed=2)
    found = triton_linear.multiply(rows[1:2], weight, None)
    assert_near(found, reference.KERNEL.multiply(rows[1:2], weight, None), steps=64, scale=4.0)
    assert launched == ["one_row_kernel"]


def test_a_row_at_an_odd_address_is_computed_by_torch(launched: list[str]) -> None:
    x = randn(65, seed=1)[1:][None]
    weight = randn(24, 64, seed=2)
    found = triton_linear.multiply(x, weight, None)
    assert_near(found, reference.KERNEL.multiply(x, weight, None), steps=64, scale=4.0)
    assert not launched
