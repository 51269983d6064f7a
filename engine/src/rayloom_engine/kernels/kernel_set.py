"""KernelSet: the implementations of all operations that a rank calls, chosen once when the rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.kernels.attention import PlanAttention, choose_attention
from rayloom_engine.kernels.kv_write import KvWrite, choose_kv_write
from rayloom_engine.kernels.linear import LinearKernel, choose_linear
from rayloom_engine.kernels.rms_norm import RmsNorm, choose_rms_norm
from rayloom_engine.kernels.rotary import Rotary, choose_rotary
from rayloom_engine.kernels.silu_mul import SiluMul, choose_silu_mul
from rayloom_engine.kernels.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """One backend of each operation, all for `target`. Layers call these backends and need not know which they are."""

    target: Target
    plan_attention: PlanAttention
    kv_write: KvWrite
    linear: LinearKernel
    rms_norm: RmsNorm
    rotary: Rotary
    silu_mul: SiluMul

    @property
    def description(self) -> str:
        """Describes the choice in one line, for the log."""
        kind = "reference" if self.target.backend == "reference" else "plain torch"
        return f"kernels: {kind} on {self.target.device.type}, {self.target.dtype_name}, {self.linear.description}"


def choose_kernels(target: Target) -> KernelSet:
    """Returns the fastest implementation of each operation that works on the target."""
    return KernelSet(
        target=target,
        plan_attention=choose_attention(target),
        kv_write=choose_kv_write(target),
        linear=choose_linear(target),
        rms_norm=choose_rms_norm(target),
        rotary=choose_rotary(target),
        silu_mul=choose_silu_mul(target),
    )
