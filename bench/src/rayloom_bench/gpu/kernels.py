"""GPU time of one step, by kernel, from torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    name: str
    calls: int  # number of calls in one step
    us: float  # GPU microseconds of all calls together


def kernel_times(step: Callable[[], object], rounds: int = 5) -> list[KernelTime]:
    """Returns the kernels of one step, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events() or ():
        if event.device_type == torch._C._autograd.DeviceType.CUDA:
            entry = totals[event.name]
            entry[0] += 1
            entry[1] += event.device_time
    found = [KernelTime(name=name, calls=round(calls / rounds), us=us / rounds) for name, (calls, us) in totals.items()]
    return sorted(found, key=lambda each: -each.us)
