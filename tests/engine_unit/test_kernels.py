"""The small ops against their references, over odd shapes and types, and the KV cache's bookkeeping."""

from __future__ import annotations

import pytest
import torch

from rayloom_engine.kernels.kv_cache import KvCache
from rayloom_engine.kernels.linear import LinearMethod, choose_linear_method, linear, pack_weight
from rayloom_engine.kernels.reference import rms_norm_reference, rotary_reference, silu_mul_reference
from rayloom_engine.kernels.rms_norm import rms_norm
from rayloom_engine.kernels.rotary import rotary
from rayloom_engine.kernels.silu_mul import silu_mul
from rayloom_engine.layers.linear import Linear
from rayloom_engine.models.rope import RotaryAngles
from rayloom_engine.models.shape import RopeParameters

CPU = torch.device("cpu")
DTYPES_TO_TOLERANCE = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES_TO_TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 64), (5, 123), (3, 4, 32), (0, 8)])
def test_rms_norm(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(sizes).to(dtype), torch.rand(sizes[-1]).to(dtype)
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_adds_to_the_residual_first() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    total = x + residual
    normed = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES_TO_TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 2), (7, 246), (0, 4)])
def test_silu_mul(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    gate_up = (3 * torch.randn(sizes)).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_rotary_turns_pairs_by_position_times_frequency(head_dim: int) -> None:
    positions = torch.tensor([0, 1, 5, 4096])
    x_THD = torch.randn(4, 5, head_dim)[:, :3]  # strided over T, as a slice of the fused projection is
    angles = RotaryAngles(RopeParameters(theta=500.0), head_dim, torch.float32, CPU)
    frequencies = 500.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    expected = rotary_reference(x_THD, positions[:, None].float() * frequencies)
    rotated = rotary(x_THD.clone(), *angles(positions))
    torch.testing.assert_close(rotated[:3], expected[:3], atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated[3], expected[3], atol=1e-2, rtol=0)  # float32 angles of thousands of radians
    assert torch.equal(rotated[0], x_THD[0])


@pytest.mark.parametrize("num_rows", [1, 3, 16, 65])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_and_plain_linear_agree(num_rows: int, has_bias: bool) -> None:
    method = choose_linear_method(CPU, torch.float32)
    x, weight = torch.randn(num_rows, 40), torch.randn(72, 40)
    bias = torch.randn(72) if has_bias else None
    expected = (x.double() @ weight.double().T + (0 if bias is None else bias)).float()
    for keeps_layout in (False, True):
        layer = Linear(weight, bias)
        layer.pack(method, keeps_layout=keeps_layout)
        torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=0)
        assert layer.num_bytes == (72 * 40 + 72 * has_bias) * 4
    torch.testing.assert_close(linear(x, weight, bias, uses_onednn=False), expected, atol=1e-4, rtol=0)


def test_a_linear_without_onednn_keeps_its_weight() -> None:
    weight = torch.randn(4, 4)
    layer = Linear(weight)
    layer.pack(LinearMethod(uses_onednn=False, reason="asked for by the test"))
    assert layer.weight is weight and not layer.uses_onednn


def test_packing_works_where_it_is_chosen() -> None:
    method = choose_linear_method(CPU, torch.float32)
    assert method.reason
    if method.uses_onednn:
        assert pack_weight(torch.ones(8, 8)).shape == (8, 8)


def test_float16_on_cpu_is_left_to_torch() -> None:
    method = choose_linear_method(CPU, torch.float16)
    assert not method.uses_onednn and "float16" in method.reason


def test_cache_writes_slots_and_copies_blocks_in_every_layer() -> None:
    cache = KvCache.allocate(
        num_layers=2, num_blocks=3, block_size=2, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=CPU
    )
    assert (cache.num_blocks, cache.block_size, cache.num_bytes) == (3, 2, 2 * 2 * 3 * 2 * 2 * 4)
    assert all(not pages.any() for pages in cache.pages)
    for layer in range(2):
        key_values = torch.stack((torch.full((2, 1, 2), 1.0 + layer), torch.full((2, 1, 2), 5.0)), dim=1)
        cache.write(layer, key_values, torch.tensor([1, 2]))
    cache.copy_blocks(((0, 2),))
    cache.copy_blocks(())
    assert cache.pages[1][:, :, 0, 0, 0].tolist() == [[0, 2], [2, 0], [0, 2]]
    assert cache.pages[0][:, :, 1, 0, 1].tolist() == [[0, 5], [5, 0], [0, 5]]
