"""Target: the hardware and the type of arithmetic for which a rank's kernels are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.errors import ConfigError

Backend = Literal["auto", "plain", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything that the choice of a kernel may depend on.

    `backend` restricts the choice. "auto" allows every backend that works here. "plain" allows only torch's public
    operations. "reference" uses the implementations that define the results: use it to find out whether a kernel is
    wrong; it is slower by orders of magnitude.
    """

    device: torch.device
    compute_dtype: torch.dtype  # type of activations and dense weights; with a library, of the weights alone
    backend: Backend = "auto"
    library: CpuLibrary | None = None  # the C library, if it computes the model

    @property
    def dtype_name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")


def parse_backend(name: str) -> Backend:
    """Returns the backend of this name; empty means "auto". Raises ConfigError for an unknown name."""
    if not name:
        return "auto"
    for backend in BACKENDS:
        if backend == name:
            return backend
    raise ConfigError(f"RAYLOOM_KERNELS: {name!r} is not a kernel backend; use one of {', '.join(BACKENDS)}")
