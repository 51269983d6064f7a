"""Chooses between the C library and torch for a rank on CPU, and starts the library's threads. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.config import Quantization
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.cpu_library.library import CpuLibrary, LibraryFunctions
from rayloom_engine.errors import ConfigError
from rayloom_engine.kernels.backend import Backend
from rayloom_engine.models.on_library.support import unsupported
from rayloom_engine.models.shape import ModelShape

VARIABLE = "RAYLOOM_CPU_ISA"  # instruction set of the library: avx2, avx512, torch (no library); empty: the best
_TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnCpu:
    """Everything about a model that decides whether the library can compute it."""

    shape: ModelShape
    num_shards: int  # ranks that share a layer
    dtype: str  # type of the KV cache, and of the weights unless they are quantised
    cut_unit: int = 1  # tensor parallelism cuts the feed-forward part at multiples of this number


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    """The choice between the C library and torch.

    `library`: None if torch computes the model. `problem`: why the library cannot compute the model; empty if the
    library is chosen, or if a setting demands torch.
    """

    library: CpuLibrary | None
    problem: str = ""


def choose_cpu_library(
    model: ModelOnCpu, backend: Backend, *, num_threads: int, cache: Path, environ: Mapping[str, str]
) -> LibraryChoice:
    """Chooses the library, and starts its threads, if the library can compute the model on this machine.

    `cache`: folder into which the library is compiled if the package has none. Raises ConfigError for an instruction
    set that this CPU cannot run.
    """
    wanted = environ.get(VARIABLE, "")
    if wanted == _TORCH or backend != "auto":
        return LibraryChoice(None)
    found = find_library(cache, environ)
    if found.path is None:
        return _without(wanted, found.problem)
    try:
        functions = LibraryFunctions(found.path)
    except OSError as error:
        return _without(wanted, f"it cannot be loaded: {error}")
    known = functions.instruction_sets
    if wanted and wanted not in known:
        raise ConfigError(
            f"{VARIABLE}: {wanted!r} is not an instruction set that the CPU library has and this CPU can run; "
            f"use one of {', '.join((*known, _TORCH))}"
        )
    if not known:
        return LibraryChoice(None, "this CPU has neither AVX2 nor AVX-512")
    if problem := unsupported(model.shape, model.num_shards, model.dtype, model.cut_unit):
        return LibraryChoice(None, problem)
    library = CpuLibrary(functions, wanted or known[0])
    # Threads are pinned only if there are as many threads as CPUs. If there are fewer, other ranks may use the same
    # CPUs, or a quota may allow less CPU time.
    try:
        library.start_threads(num_threads, pin=num_threads == len(os.sched_getaffinity(0)))
    except OSError as error:
        raise ConfigError(f"threads: {error.strerror}") from error
    return LibraryChoice(library)


def check_quantization(quantization: Quantization, device: str, chosen: LibraryChoice) -> None:
    """Raises ConfigError if `quantization` demands int8 weights and the library does not compute the model."""
    if quantization != "int8" or chosen.library is not None:
        return
    if device != "cpu":
        raise ConfigError(
            f"quantization: {quantization!r} works on CPU only, and this rank computes on {device}; set device to "
            "'cpu', or quantization to 'none'"
        )
    reason = chosen.problem or f"{VARIABLE} or RAYLOOM_KERNELS demands torch"
    raise ConfigError(
        f"quantization: {quantization!r} needs the CPU library, which is not used, because {reason}; change that, or "
        "set quantization to 'none'"
    )


def _without(wanted: str, problem: str) -> LibraryChoice:
    if wanted:
        raise ConfigError(f"{VARIABLE}: {wanted!r} needs the CPU library, and there is none: {problem}; use {_TORCH}")
    return LibraryChoice(None, problem)
