"""The limits of a GPU, measured in the same run: bytes per second of its memory, FLOP/s of a product in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = 2 << 30
_MATMUL_N = 8192
_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    name: str
    bytes_per_s: float  # bytes that a copy reads and writes in a second
    flop_per_s: float


def measure_limits(device: torch.device) -> GpuLimits:
    """Returns both limits, each from the fastest of several rounds."""
    return GpuLimits(
        name=torch.cuda.get_device_name(device), bytes_per_s=_bytes_per_s(device), flop_per_s=_flop_per_s(device)
    )


def _bytes_per_s(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / fastest_s(lambda: target.copy_(source))


def _flop_per_s(device: torch.device) -> float:
    a = torch.randn(_MATMUL_N, _MATMUL_N, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return 2 * _MATMUL_N**3 / fastest_s(lambda: torch.matmul(a, a, out=out))


def fastest_s(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Returns the GPU's seconds for a call: the least of several rounds, after two rounds that do not count."""
    times: list[float] = []
    for number in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return min(times)
