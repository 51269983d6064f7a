"""A kernel starts while its predecessor in the stream still runs: programmatic dependent launch, of NVIDIA from Hopper.

Without it, the GPU is partly idle between two kernels: the last programs of one finish, then the next is launched and
waits for its first reads. With it, the next kernel is launched once every program of its predecessor has called
`wait_for_predecessor` or has ended. This function returns when the predecessor has ended and its results are visible.
Before the call, a program may read only weights, which no step writes; after the call it may read and write
everything. Every program calls the function before it can return. So when a kernel starts, all kernels before its
predecessor have ended.

`make kernels` looks for the wait in the machine code, and for reads and writes before it.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import triton
import triton.language as tl

from rayloom_engine.kernels.triton.shipped import GPUS, Gpu

EARLY_GPUS: tuple[Gpu, ...] = ("sm_90", "sm_100")
OTHER_GPUS: tuple[Gpu, ...] = tuple(gpu for gpu in GPUS if gpu not in EARLY_GPUS)
_DRIVER = "libcuda.so.1"
_GRAPHS_KEEP_IT = 12030  # drivers from CUDA 12.3 on capture early starts in CUDA graphs


@triton.jit
def wait_for_predecessor(STARTS_EARLY: tl.constexpr):
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early_start(device: torch.device) -> dict[str, bool]:
    """Returns the arguments of a launch with which its kernel starts early, if the device can do this.

    The kernel has the constant STARTS_EARLY.
    """
    return {"STARTS_EARLY": True, "launch_pdl": True} if starts_early(device) else {"STARTS_EARLY": False}


@functools.cache
def starts_early(device: torch.device) -> bool:
    """True if kernels of the device can start early."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0) and _driver() >= _GRAPHS_KEEP_IT


def _driver() -> int:
    """Returns the version of CUDA that the driver supports, as 1000 times the major and 10 times the minor number.

    Returns 0 if the driver does not tell.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
