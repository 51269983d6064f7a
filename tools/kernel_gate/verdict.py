"""The verdict on a compiled kernel: limits of the GPU, expected instructions, and the figures on file. Pure."""

from __future__ import annotations

from dataclasses import fields

from kernel_gate.machine_code import Figures
from rayloom_engine.kernels.triton.shipped import AMD_GPUS, Gpu, Shipped

# Shared memory (AMD: LDS) that one program may have, in bytes.
SHARED_LIMITS: dict[Gpu, int] = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}


def problems(shipped: Shipped, gpu: Gpu, figures: Figures, recorded: Figures | None) -> list[str]:
    """Returns a sentence for each figure that is not allowed. `recorded`: the figures on file, or None."""
    place = f"{shipped.name} on {gpu}"
    found = []
    if figures.spilled_bytes:
        found.append(
            f"{place}: {figures.spilled_bytes} bytes of each thread spill to memory; use smaller tiles or more warps"
        )
    limit = SHARED_LIMITS[gpu]
    if figures.shared_bytes > limit:
        found.append(
            f"{place}: {figures.shared_bytes:,} bytes of shared memory, and the GPU has {limit:,}; "
            "use smaller tiles or fewer stages"
        )
    if shipped.multiplies_matrices and not figures.matrix:
        found.append(f"{place}: no matrix instruction, although the kernel multiplies matrices; check types and tiles")
    if shipped.copies_asynchronously and gpu not in AMD_GPUS and not figures.async_copies:
        found.append(f"{place}: no asynchronous copy; check num_stages, and that loads are aligned")
    if recorded is not None:
        found += [
            f"{place}: {name} is {getattr(figures, name)!r}, on file {getattr(recorded, name)!r}; "
            "if that is meant, run `make kernels ARGS=--record`"
            for name in (field.name for field in fields(Figures))
            if getattr(figures, name) != getattr(recorded, name)
        ]
    return found


def missing(kernel: str, gpu: str) -> str:
    return f"{kernel} on {gpu}: no figures on file for this code; run `make kernels ARGS=--record`"


def superfluous(kernel: str, gpu: str) -> str:
    return f"{kernel} on {gpu}: on file, but no longer shipped; run `make kernels ARGS=--record`"
