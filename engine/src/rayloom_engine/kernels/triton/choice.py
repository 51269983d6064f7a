"""The choice between Triton kernels and others, by the setting RAYLOOM_KERNELS and by what this machine can run."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from rayloom_engine.errors import ConfigError
from rayloom_engine.kernels.target import Target


def uses_triton(target: Target) -> bool:
    """True if the target uses Triton kernels, for the operations that have one."""
    if target.backend == "auto":
        return target.device.type == "cuda" and not problem(target)
    return target.backend == "triton"


def check_backend(target: Target) -> None:
    """Raises ConfigError if Triton kernels are demanded and cannot run on the target."""
    if target.backend == "triton" and (reason := problem(target)):
        raise ConfigError(
            f"RAYLOOM_KERNELS: 'triton' cannot be used, because {reason}; use 'auto', which takes kernels that run here"
        )


def problem(target: Target) -> str:
    """Returns why Triton kernels cannot run on the target; empty if they can.

    The first call on a GPU compiles a small kernel, runs it and checks its result. At run time, Triton needs a C
    compiler and a folder for its cache. Only a compilation shows whether both exist.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if target.device.type == "cuda":
        return _trial(target.device) if torch.cuda.is_available() else ""
    if is_interpreted():
        return ""
    return f"this rank computes on {target.device.type}, and Triton kernels run on a GPU"


def is_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels, on a CPU and slowly. Tests use it."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


@functools.cache
def _trial(device: torch.device) -> str:
    """Returns why a small kernel does not run on the device, or gives a wrong result; empty if all is well."""
    from rayloom_engine.kernels.silu_mul import reference, triton_gpu

    x = torch.linspace(-4.0, 4.0, 64, device=device).view(2, 32)
    try:
        found = triton_gpu.silu_mul(x)
        is_right = torch.allclose(found, reference.silu_mul(x), atol=1e-5)
    except Exception as error:  # noqa: BLE001 - the compiler, the C compiler, the cache or the driver
        return f"a small Triton kernel failed ({type(error).__name__}: {str(error).strip()[:200]})"
    return "" if is_right else "a small Triton kernel gave a wrong result"
