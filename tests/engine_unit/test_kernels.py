"""The small operations equal their references for odd shapes and all types. Tests the choice of their backends, too."""

from __future__ import annotations

import math

import pytest
import torch

from rayloom_engine.errors import ConfigError
from rayloom_engine.kernels import linear
from rayloom_engine.kernels.backend import parse_backend
from rayloom_engine.kernels.clamped_silu_mul import plain as plain_clamped
from rayloom_engine.kernels.clamped_silu_mul import reference as reference_clamped
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.kv_write import plain as plain_kv_write
from rayloom_engine.kernels.kv_write import reference as reference_kv_write
from rayloom_engine.kernels.linear import onednn
from rayloom_engine.kernels.rms_norm import plain as plain_norm
from rayloom_engine.kernels.rms_norm import reference as reference_norm
from rayloom_engine.kernels.rotary.plain import PlainRotary
from rayloom_engine.kernels.rotary.reference import ReferenceRotary
from rayloom_engine.kernels.rotary_kv_write import QkNorms
from rayloom_engine.kernels.silu_mul import plain as plain_silu
from rayloom_engine.kernels.silu_mul import reference as reference_silu
from rayloom_engine.kernels.target import Target
from rayloom_engine.models.rope.angles import RotaryAngles
from rayloom_engine.models.rope.parameters import RopeParameters
from rt_tiny import cpu_kernels

CPU = torch.device("cpu")
DTYPES_TO_TOLERANCE = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES_TO_TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 64), (5, 123), (3, 4, 32), (0, 8)])
def test_rms_norm_agrees_with_its_reference(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(sizes).to(dtype), torch.rand(sizes[-1]).to(dtype)
    expected = reference_norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(plain_norm.rms_norm(x, weight, 1e-5), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("body", [plain_norm, reference_norm])
def test_rms_norm_adds_to_the_residual_first(body) -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    total = x + residual
    normed = body.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, reference_norm.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES_TO_TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 2), (7, 246), (0, 4)])
def test_clamped_silu_mul_agrees_with_its_reference(
    sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    gate_up = (4 * torch.randn(sizes)).to(dtype)
    given = gate_up.clone()
    expected = reference_clamped.clamped_silu_mul(gate_up, slope=1.7, limit=3.0)
    ours = plain_clamped.clamped_silu_mul(gate_up, slope=1.7, limit=3.0)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(gate_up, given)


def test_clamped_silu_mul_clamps_gate_and_up() -> None:
    gate_up = torch.tensor([[5.0, -5.0, 1.0, 2.0, -9.0, 9.0]])  # gate 5, -5, 1; up 2, -9, 9
    ours = reference_clamped.clamped_silu_mul(gate_up, slope=2.0, limit=3.0)
    sigmoids = [1 / (1 + math.exp(-2 * gate)) for gate in (3.0, -5.0, 1.0)]
    expected = [3.0 * 3.0 * sigmoids[0], -2.0 * -5.0 * sigmoids[1], 4.0 * 1.0 * sigmoids[2]]
    assert ours[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES_TO_TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 2), (7, 246), (0, 4)])
def test_silu_mul_agrees_with_its_reference(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    gate_up = (3 * torch.randn(sizes)).to(dtype)
    expected = reference_silu.silu_mul(gate_up)
    torch.testing.assert_close(plain_silu.silu_mul(gate_up), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_rotary_turns_pairs_by_position_times_frequency(head_dim: int) -> None:
    positions = torch.tensor([0, 1, 5, 4096])
    x_THD = torch.randn(4, 5, head_dim)[:, :3]  # strided over T, like a slice of the fused projection
    kernels = cpu_kernels()
    tables = RotaryAngles(RopeParameters(theta=500.0), head_dim, kernels)(positions)
    frequencies = 500.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    reference = ReferenceRotary()
    exact = reference.prepare(positions[:, None].float() * frequencies, torch.float32)
    expected = reference.rotate(x_THD.clone(), exact)
    rotated = kernels.rotary.rotate(x_THD.clone(), tables)
    torch.testing.assert_close(rotated[:3], expected[:3], atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated[3], expected[3], atol=1e-2, rtol=0)  # large angles are inexact in float32
    assert torch.equal(rotated[0], x_THD[0])


@pytest.mark.parametrize("rotary", [PlainRotary(CPU), ReferenceRotary()], ids=lambda rotary: type(rotary).__name__)
def test_rotary_works_in_place_on_a_slice_of_the_projection(rotary) -> None:
    fused = torch.randn(3, 5, 8)
    before = fused.clone()
    rotary.rotate(fused[:, :2], rotary.prepare(torch.ones(3, 4), torch.float32))
    assert not torch.equal(fused[:, :2], before[:, :2])
    assert torch.equal(fused[:, 2:], before[:, 2:])


@pytest.mark.parametrize("num_rows", [1, 3, 16, 65])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_every_linear_agrees_with_its_reference(num_rows: int, has_bias: bool, backend) -> None:
    kernel = cpu_kernels(backend=backend).linear
    x, weight = torch.randn(num_rows, 40), torch.randn(72, 40)
    bias = torch.randn(72) if has_bias else None
    expected = cpu_kernels(backend="reference").linear.multiply(x, weight, bias)
    for stored in (weight, kernel.pack(weight)):
        assert stored.shape == (72, 40)
        torch.testing.assert_close(kernel.multiply(x, stored, bias), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("body", [plain_kv_write, reference_kv_write])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_rounded_into_their_slots(body, dtype: torch.dtype) -> None:
    pages = torch.zeros(3, 2, 2, 1, 2, dtype=dtype)
    key_values = torch.randn(2, 4, 2)[:, :2]  # a token's key, then its value; strided over T
    body.kv_write(pages, key_values, torch.tensor([5, 2]))
    expected = torch.zeros_like(pages)
    expected[2, 1] = key_values[0].to(dtype)[:, None]
    expected[1, 0] = key_values[1].to(dtype)[:, None]
    assert torch.equal(pages, expected)


def test_a_rank_logs_one_line_about_its_kernels() -> None:
    assert cpu_kernels(backend="plain").description == "kernels: plain torch on cpu, float32, linear by torch"
    assert cpu_kernels(backend="reference").description == "kernels: reference on cpu, float32, linear in float64"
    float16 = choose_kernels(Target(device=CPU, compute_dtype=torch.float16))
    assert float16.description == (
        "kernels: plain torch on cpu, float16, linear by torch (oneDNN weights are not used in float16)"
    )
    if not onednn.problem(Target(device=CPU, compute_dtype=torch.float32)):
        assert cpu_kernels().description == "kernels: plain torch on cpu, float32, linear by oneDNN (packed weights)"


def test_onednn_that_gives_a_wrong_result_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_pack", lambda weight: weight)
    monkeypatch.setattr(onednn, "_multiply", lambda x, weight, bias: x)
    chosen = linear.choose_linear(Target(device=CPU, compute_dtype=torch.float32))
    assert chosen.description == "linear by torch (oneDNN's packed linear gave a wrong result)"


def test_an_unknown_backend_is_refused_with_the_names_of_those_that_exist() -> None:
    assert (parse_backend(""), parse_backend("plain")) == ("auto", "plain")
    with pytest.raises(ConfigError, match=r"RAYLOOM_KERNELS: 'fast' .* use one of auto, plain, reference, triton"):
        parse_backend("fast")


def test_triton_kernels_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = "'triton' cannot be used, because this rank computes on cpu, and Triton kernels run on a GPU; use 'auto'"
    with pytest.raises(ConfigError, match=message):
        cpu_kernels(backend="triton")


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_rotation_and_write_are_their_parts(dtype: torch.dtype, has_norms: bool) -> None:
    qkv = torch.randn(3, 8, 16).to(dtype)  # 4 query heads, 2 key heads, 2 value heads
    slots = torch.tensor([5, 0, 2])
    norms = QkNorms(torch.rand(16).to(dtype), torch.rand(16).to(dtype), 1e-5) if has_norms else None
    found = []
    for backend in ("plain", "reference"):
        kernels = cpu_kernels(dtype, backend)
        pages = torch.zeros(3, 2, 2, 2, 16, dtype=dtype)
        tables = kernels.rotary.prepare(torch.linspace(0, 9, 24).view(3, 8), dtype)
        queries = kernels.rotary_kv_write(qkv.clone(), pages, slots, tables, norms)
        assert queries.shape == (3, 4, 16)
        assert torch.equal(pages[2, 1, 1], qkv[0, 6:]), "values are written as they are"
        assert not pages[0, 1].any() and not pages[1, 1].any()
        found.append((queries, pages))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found[0], found[1], atol=tolerance, rtol=tolerance)
