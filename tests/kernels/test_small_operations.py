"""The norm, the activation, and norms with rotation and cache write: each against its reference.

The cases have odd sizes, rows of one element and empty batches, in every type that a model may have.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.kernels.kv_write import reference as reference_kv_write
from rayloom_engine.kernels.rms_norm import reference as reference_norm
from rayloom_engine.kernels.rms_norm import triton_gpu as triton_norm
from rayloom_engine.kernels.rotary.reference import ReferenceRotary
from rayloom_engine.kernels.rotary_kv_write import QkNorms, triton_gpu
from rayloom_engine.kernels.rotary_kv_write.composed import ComposedRotaryKvWrite
from rayloom_engine.kernels.silu_mul import reference as reference_silu
from rayloom_engine.kernels.silu_mul import triton_gpu as triton_silu
from rayloom_engine.kernels.triton.choice import is_interpreted
from rt_triton import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5
# Roundings by which a kernel and its reference may differ. The interpreter truncates bfloat16 instead of rounding it,
# and a truncation counts as two roundings. In addition, the input of the norm is a truncated sum.
ROUNDINGS = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 6 if is_interpreted() else 2}
SEEDS = st.integers(0, 2**32)
# The definition of the fused operation, which rounds after each part.
REFERENCE = ComposedRotaryKvWrite(reference_norm.rms_norm, ReferenceRotary(), reference_kv_write.kv_write)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 3)]),
    size=st.sampled_from([1, 2, 3, 17, 64, 80, 96, 100, 576, 1025]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    has_residual=st.booleans(),
    seed=SEEDS,
)
def test_rms_norm_is_its_reference(
    rows: tuple[int, ...], size: int, dtype: torch.dtype, scale: float, has_residual: bool, seed: int
) -> None:
    x = randn(*rows, size, seed=seed, scale=scale, dtype=dtype)
    weight = randn(size, seed=seed + 1, dtype=dtype)
    residuals = [randn(*rows, size, seed=seed + 2, scale=scale, dtype=dtype) if has_residual else None for _ in "xx"]
    before = x.clone()
    found = triton_norm.rms_norm(x, weight, EPS, residuals[0])
    expected = reference_norm.rms_norm(x, weight, EPS, residuals[1])
    assert torch.equal(x, before)
    assert found.shape == expected.shape and found.dtype == dtype
    assert_near(found, expected, steps=ROUNDINGS[dtype])
    if residuals[0] is not None and residuals[1] is not None:
        if dtype == torch.bfloat16 and is_interpreted():  # the interpreter truncates bfloat16 instead of rounding it
            assert_near(residuals[0], residuals[1], steps=2)
        else:
            assert torch.equal(residuals[0], residuals[1]), "the sum is rounded as torch rounds it"


def test_rms_norm_of_a_slice_reads_its_own_rows() -> None:
    x = randn(3, 5, 16)
    weight = torch.ones(16).to(DEVICE)
    found = triton_norm.rms_norm(x[:, 1:3], weight, EPS)
    expected = reference_norm.rms_norm(x[:, 1:3], weight, EPS)
    assert_near(found, expected, steps=4)


def test_rms_norm_of_large_float16_does_not_overflow() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16, device=DEVICE)  # 300 ** 2 is above float16's largest number
    found = triton_norm.rms_norm(x, torch.ones(8, dtype=torch.float16).to(DEVICE), EPS)
    assert found.tolist() == [[1.0] * 8]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([(0,), (1,), (3,), (2, 2)]),
    half=st.sampled_from([1, 2, 33, 96, 1024, 1025]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
    seed=SEEDS,
)
def test_silu_mul_is_its_reference(
    rows: tuple[int, ...], half: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    gate_up = randn(*rows, 2 * half, seed=seed, scale=scale, dtype=dtype)
    found = triton_silu.silu_mul(gate_up)
    expected = reference_silu.silu_mul(gate_up)
    assert found.shape == (*rows, half) and found.dtype == dtype
    # The relative error of a GPU's exponential grows with its argument: some 20 roundings of float32 at -10.
    steps = 32 if dtype is torch.float32 else 2 * ROUNDINGS[dtype]
    assert_near(found, expected, steps=steps, scale=1e-3)


def test_silu_of_a_very_negative_gate_is_zero() -> None:
    gate_up = torch.tensor([[-1000.0, 0.0, 1000.0, 5.0, 5.0, 5.0]], device=DEVICE)
    assert triton_silu.silu_mul(gate_up).tolist() == [[0.0, 0.0, 5000.0]]


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 2, 5]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 1), (3, 3)]),
    head_dim=st.sampled_from([2, 16, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from([None, torch.float16]),
    has_norms=st.booleans(),
    rotated_share=st.sampled_from([1.0, 0.75, 0.5, 0.25]),
    seed=SEEDS,
)
def test_norms_rotation_and_write_are_their_references(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    has_norms: bool,
    rotated_share: float,
    seed: int,
) -> None:
    num_queries, num_kv_heads = heads
    num_blocks, block_size = 4, 4
    generator = torch.Generator().manual_seed(seed)
    qkv = randn(num_tokens, num_queries + 2 * num_kv_heads, head_dim, seed=seed, dtype=dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(DEVICE)
    angles = 1000 * torch.rand(num_tokens, max(1, int(rotated_share * head_dim // 2)), generator=generator).to(DEVICE)
    pages = randn(num_blocks, block_size, 2, num_kv_heads, head_dim, seed=seed + 1, dtype=page_dtype or dtype)
    norms = QkNorms(*(randn(head_dim, seed=seed + n, dtype=dtype) for n in (2, 3)), EPS) if has_norms else None
    tables = ReferenceRotary().prepare(angles, dtype)
    expected_pages, exact_pages = pages.clone(), pages.clone()
    expected = REFERENCE(qkv.clone(), expected_pages, slots, tables, norms)
    found = triton_gpu.rotary_kv_write(qkv, pages, slots, tables, norms)
    assert found.shape == (num_tokens, num_queries, head_dim)
    # The reference rounds the norm before the rotation. So each of the two products of a rotation has an additional
    # rounding.
    steps = 4 * ROUNDINGS[dtype]
    assert_near(found, expected, steps=steps, scale=3.0)
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    for tested, before in ((pages, exact_pages), (expected_pages, exact_pages)):
        assert torch.equal(tested.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
    assert torch.equal(pages[:, :, 1], expected_pages[:, :, 1]), "values are only rounded"
    torch.testing.assert_close(pages[:, :, 0].float(), expected_pages[:, :, 0].float(), rtol=0.05, atol=0.05)
    assert_near(
        pages[:, :, 0], expected_pages[:, :, 0], steps=steps + 2, scale=3.0 * max(1.0, ratio(dtype, pages.dtype))
    )


def ratio(coarse: torch.dtype, fine: torch.dtype) -> float:
    """The error of one rounding in the type `coarse`, as a number of roundings in the type `fine`."""
    return torch.finfo(coarse).eps / torch.finfo(fine).eps


def test_a_token_at_position_zero_is_not_rotated() -> None:
    qkv = randn(1, 4, 64)
    pages = torch.zeros(1, 2, 2, 1, 64, device=DEVICE)
    tables = ReferenceRotary().prepare(torch.zeros(1, 32, device=DEVICE), torch.float32)
    found = triton_gpu.rotary_kv_write(qkv.clone(), pages, torch.tensor([1], device=DEVICE), tables, None)
    assert torch.equal(found, qkv[:, :2])
    assert torch.equal(pages[0, 1, 0], qkv[0, 2:3]) and torch.equal(pages[0, 1, 1], qkv[0, 3:])
    assert not pages[0, 0].any()
