"""KernelSet: the implementations of all operations that a rank calls, chosen once when the rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.kernels.attention import PlanAttention, choose_attention
from rayloom_engine.kernels.clamped_silu_mul import ClampedSiluMul, choose_clamped_silu_mul
from rayloom_engine.kernels.gated_linear import GatedLinear, choose_gated_linear
from rayloom_engine.kernels.gelu_mul import GeluMul, choose_gelu_mul
from rayloom_engine.kernels.linear import LinearKernel, choose_linear
from rayloom_engine.kernels.rms_norm import RmsNorm, choose_rms_norm
from rayloom_engine.kernels.rotary import Rotary, choose_rotary
from rayloom_engine.kernels.rotary_kv_write import RotaryKvWrite, choose_rotary_kv_write
from rayloom_engine.kernels.silu_mul import SiluMul, choose_silu_mul
from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import check_backend, problem, uses_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """One backend of each operation, all for `target`. Layers call these backends and need not know which they are."""

    target: Target
    plan_attention: PlanAttention
    linear: LinearKernel
    rms_norm: RmsNorm
    rotary: Rotary
    rotary_kv_write: RotaryKvWrite
    silu_mul: SiluMul
    gated_linear: GatedLinear | None
    gelu_mul: GeluMul
    clamped_silu_mul: ClampedSiluMul

    @property
    def description(self) -> str:
        """Describes the choice in one line, for the log."""
        kind = "reference" if self.target.backend == "reference" else "plain torch"
        if uses_triton(self.target):
            kind = "Triton"
        elif self.target.backend == "auto" and self.target.device.type == "cuda":
            kind = f"plain torch ({problem(self.target)})"
        return f"kernels: {kind} on {self.target.device.type}, {self.target.dtype_name}, {self.linear.description}"


def choose_kernels(target: Target) -> KernelSet:
    """Returns for each operation the fastest implementation that works on the target.

    Raises ConfigError if the target demands a backend that does not work there.
    """
    check_backend(target)
    rotary = choose_rotary(target)
    return KernelSet(
        target=target,
        plan_attention=choose_attention(target),
        linear=choose_linear(target),
        rms_norm=choose_rms_norm(target),
        rotary=rotary,
        rotary_kv_write=choose_rotary_kv_write(target, rotary),
        silu_mul=choose_silu_mul(target),
        gated_linear=choose_gated_linear(target),
        gelu_mul=choose_gelu_mul(target),
        clamped_silu_mul=choose_clamped_silu_mul(target),
    )
