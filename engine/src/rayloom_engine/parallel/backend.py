"""Backend: the library of torch's process groups through which ranks exchange tensors. Pure, and imports no torch."""

from __future__ import annotations

from typing import Literal

Backend = Literal["gloo", "nccl"]  # gloo exchanges tensors in host memory, NCCL tensors on GPUs


def choose_backend(device_type: str, ranks_per_gpu: int) -> Backend:
    """Returns nccl for ranks that have a GPU each. NCCL refuses two ranks on one GPU, so such ranks use gloo."""
    return "nccl" if device_type == "cuda" and ranks_per_gpu == 1 else "gloo"
