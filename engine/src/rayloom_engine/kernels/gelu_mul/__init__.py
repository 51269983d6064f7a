"""The gated activation of Gemma's MLP (arXiv:2002.05202), with GELU in its tanh form (arXiv:1606.08415).

y = gelu(gate) * up,   gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
"""

from __future__ import annotations

from rayloom_engine.kernels.silu_mul import SiluMul
from rayloom_engine.kernels.target import Target

GeluMul = SiluMul  # the same arguments and the same result type


def choose_gelu_mul(target: Target) -> GeluMul:
    if target.backend == "reference":
        from rayloom_engine.kernels.gelu_mul import reference

        return reference.gelu_mul
    from rayloom_engine.kernels.gelu_mul import plain

    return plain.gelu_mul
