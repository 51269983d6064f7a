"""The product by oneDNN. The weight is either plain or in oneDNN's own packed layout.

A weight is packed once, and its plain copy is dropped. Measured in float32 on 2 AVX2 cores, all linears of a 135 M
model, in ms at 1 / 16 / 64 rows: plain 35 / 86 / 153, packed 22 / 40 / 110. For the head, even a plain weight is up to
twice as fast in this oneDNN call as in torch's linear (5 against 10 ms at one row). So this call also multiplies
matrices that must stay plain because their rows are looked up.
"""

from __future__ import annotations

import torch

from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.kernels.target import Target

# Number of rows for which the packed layout is tuned. In float32, products are equally fast with all values except 1.
# With 1, products of 2 or more rows are slow.
_ROWS_HINT = 16


def problem(target: Target) -> str:
    """Returns why oneDNN cannot multiply on this target; empty if it can.

    Both oneDNN calls are private to torch, so this function tries them once and checks the result.
    """
    if target.device.type != "cpu":
        return f"the device is {target.device.type}"
    if target.compute_dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN weights are not used in {target.dtype_name}"
    try:
        if target.compute_dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bfloat16 instructions"
        ones = torch.ones(16, 16, dtype=target.compute_dtype)
        packed = _pack(ones)
        with torch.inference_mode():  # ranks multiply in this mode, but pack outside it
            result = _multiply(ones.clone(), packed, None)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"oneDNN's packed linear failed: {error}"
    if not torch.equal(result, torch.full_like(result, 16)):
        return "oneDNN's packed linear gave a wrong result"
    return ""


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns the [out, in] weight as an opaque tensor of the same logical shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


KERNEL = LinearKernel(multiply=_multiply, pack=_pack, description="linear by oneDNN (packed weights)")
