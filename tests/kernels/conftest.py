"""Tests of the Triton kernels, which run on a GPU, or in Triton's interpreter: `make test-kernels`.

The interpreter must be chosen before a kernel is defined. Without the interpreter and without a GPU, pytest does not
collect these files.
"""

from __future__ import annotations

import os


def can_run() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    import torch

    return torch.cuda.is_available()


collect_ignore_glob = [] if can_run() else ["test_*.py"]
