"""Backend: the setting RAYLOOM_KERNELS, which restricts the choice of kernels. Read without torch."""

from __future__ import annotations

from typing import Literal, get_args

from rayloom_engine.errors import ConfigError

Backend = Literal["auto", "plain", "reference", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def parse_backend(name: str) -> Backend:
    """Returns the backend of this name; empty means "auto". Raises ConfigError for an unknown name."""
    if not name:
        return "auto"
    for backend in BACKENDS:
        if backend == name:
            return backend
    raise ConfigError(f"RAYLOOM_KERNELS: {name!r} is not a kernel backend; use one of {', '.join(BACKENDS)}")
