"""The device that a rank computes on, and the type of its weights, from the settings `device` and `dtype`.

Device and type are names instead of torch's objects, because they decide whether this process imports torch at all. A
search for CUDA devices imports torch. So this module searches only if a device file of a GPU exists, or if the setting
demands CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayloom_engine.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
# Device files of GPUs: NVIDIA's, on Windows' subsystem for Linux, on Jetson, and AMD's.
_DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg", "nvhost-gpu", "nvgpu", "kfd")


def choose_device(device: str, has_cuda: Callable[[], bool], device_files: Path = Path("/dev")) -> str:
    """Returns cpu or cuda. Raises ConfigError if `device` is cuda and there is no CUDA device.

    `has_cuda`: returns whether torch finds a CUDA device.
    """
    if device == "cpu" or (device == "auto" and not may_have_gpu(device_files)):
        return "cpu"
    if has_cuda():
        return "cuda"
    if device == "cuda":
        raise ConfigError("device: 'cuda', but no CUDA device is visible; use 'cpu' or 'auto'")
    return "cpu"


def may_have_gpu(device_files: Path = Path("/dev")) -> bool:
    """Returns whether this machine may have a GPU that torch calls a CUDA device."""
    return any(next(device_files.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def choose_weight_type(dtype: str, checkpoint_dtype: str) -> str:
    """Returns the type of the weights, one of DTYPES. Raises ConfigError if auto means a type that is not in DTYPES."""
    wanted = checkpoint_dtype if dtype == "auto" else dtype
    if wanted not in DTYPES:
        raise ConfigError(f"dtype: auto means {wanted!r} for this checkpoint; choose one of {', '.join(DTYPES)}")
    return wanted
