"""DeviceChoice: the device that a rank computes on, the dtypes, and the reason for the automatic choices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rayloom_engine.config import INT8_GROUP, Quantization
from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    device: torch.device
    dtype: torch.dtype  # weights are rounded to this type; quantised weights are rounded before they are quantised
    compute_dtype: torch.dtype  # activations are multiplied in this type; without the C library also stored weights
    reason: str

    def on_library(self, library: CpuLibrary, quantization: Quantization = "none") -> DeviceChoice:
        """Returns this choice for the C library, which keeps dense weights in `dtype` on every CPU."""
        compute = library.operand_dtype(self.dtype)
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, compute)]
        reason = f"{names[0]} weights, activations multiplied in {names[1]}, sums in float32"
        if quantization == "int8":
            reason = (
                f"int8 weights, activations multiplied in int8 in groups of {INT8_GROUP}, all else in {names[1]} or "
                f"float32, KV cache in {names[0]}"
            )
        return replace(self, compute_dtype=compute, reason=reason)


def choose_device(device: str, dtype: str, checkpoint_dtype: str) -> DeviceChoice:
    """Chooses device and dtypes from the settings `device` and `dtype`.

    Raises ConfigError if `device` is cuda and there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device: 'cuda', but no CUDA device is visible; use 'cpu' or 'auto'")
    name = "cuda" if device == "cuda" or (device == "auto" and has_cuda) else "cpu"
    wanted = checkpoint_dtype if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype: auto means {wanted!r} for this checkpoint; choose one of {', '.join(_DTYPES)}")
    weights = _DTYPES[wanted]
    compute, reason = (weights, f"{name} computes in {wanted}") if name == "cuda" else _cpu_dtype(weights, wanted)
    if dtype == "auto":
        reason = f"checkpoint is {wanted}; {reason}"
    return DeviceChoice(device=torch.device(name), dtype=weights, compute_dtype=compute, reason=reason)


def _cpu_dtype(weights: torch.dtype, name: str) -> tuple[torch.dtype, str]:
    if weights is torch.float32:
        return weights, "float32 everywhere"
    is_bf16 = weights is torch.bfloat16
    ops = torch.ops.mkldnn
    if ops._is_mkldnn_bf16_supported() if is_bf16 else ops._is_mkldnn_fp16_supported():
        return weights, f"this CPU has {name} instructions"
    # Without these instructions torch converts element by element: a product takes 2.4 times as long as in float32 at
    # 16 rows, and 4.8 times as long at 64.
    return torch.float32, f"this CPU has no {name} instructions, so the weights are widened to float32"
