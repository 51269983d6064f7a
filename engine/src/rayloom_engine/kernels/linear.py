"""x @ weight.T + bias, with the weight either plain or in oneDNN's own packed layout.

Packing is done once, and the plain copy is dropped. Measured in float32 on 2 AVX2 cores, all linears of a 135 M
model, ms: plain 35 / 86 / 153 at 1 / 16 / 64 rows, packed 22 / 40 / 110. Plain weights through the same oneDNN call
are still up to twice as fast as torch's linear for the head (10 against 5 ms at one row), so a matrix that cannot be
packed, because its rows are looked up as well, takes that way. The two oneDNN calls are private to torch: they are
tried once, at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Rows that the packed layout is tuned for. In float32 every value did equally well except 1, which is slow from 2
# rows on.
_ROWS_HINT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMethod:
    """How this process multiplies by weights. `reason` is for the log."""

    uses_onednn: bool
    reason: str


def choose_linear_method(device: torch.device, compute_dtype: torch.dtype) -> LinearMethod:
    """Packed oneDNN weights where this CPU and this torch can do them in the compute type, else torch's linear."""
    if device.type != "cpu":
        return LinearMethod(uses_onednn=False, reason=f"torch linear: the device is {device.type}")
    if compute_dtype not in (torch.float32, torch.bfloat16):
        return LinearMethod(uses_onednn=False, reason=f"torch linear: oneDNN weights are not used in {compute_dtype}")
    try:
        if compute_dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return LinearMethod(uses_onednn=False, reason="torch linear: this CPU has no bfloat16 instructions")
        probe = torch.ones(16, 16, dtype=compute_dtype)
        packed = pack_weight(probe)
        with torch.inference_mode():  # as the rank calls it; weights are packed outside
            result = _onednn_linear(probe.clone(), packed, None)
    except (RuntimeError, AttributeError, TypeError) as error:
        return LinearMethod(uses_onednn=False, reason=f"torch linear: oneDNN's packed linear failed ({error})")
    if not torch.equal(result, torch.full_like(result, 16)):
        return LinearMethod(uses_onednn=False, reason="torch linear: oneDNN's packed linear gave a wrong result")
    return LinearMethod(uses_onednn=True, reason=f"oneDNN packed weights: {compute_dtype} on CPU")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The [out, in] weight in oneDNN's layout, an opaque tensor of the same logical shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, uses_onednn: bool) -> torch.Tensor:
    """[..., out] from x [..., in] and weight [out, in], which may be packed when `uses_onednn`."""
    return _onednn_linear(x, weight, bias) if uses_onednn else F.linear(x, weight, bias)


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
