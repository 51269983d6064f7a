"""Models on the C library, with every instruction set that this CPU can run.

Without a C++ compiler `ISAS` is empty, and the tests that it parametrises are skipped.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

from rayloom_engine.config import Quantization
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.cpu_library.library import CpuLibrary, LibraryFunctions
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.models.cpu_decoder import BLOCK_SIZE
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart

CPU = torch.device("cpu")


@functools.cache
def library_functions() -> LibraryFunctions | None:
    path = find_library(cache_folder(os.environ), os.environ).path
    return None if path is None else LibraryFunctions(path)


def _instruction_sets() -> tuple[str, ...]:
    functions = library_functions()
    return () if functions is None else functions.instruction_sets


ISAS = _instruction_sets()


def open_library(isa: str, num_threads: int = 2) -> CpuLibrary:
    """The library with an instruction set. By default it has several threads, so that they share the attention."""
    functions = library_functions()
    assert functions is not None
    library = CpuLibrary(functions, isa)
    library.start_threads(num_threads, pin=False)
    return library


def load_on_library(
    folder: Path,
    isa: str,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    quantization: Quantization = "none",
) -> RankModel:
    kernels = choose_kernels(Target(device=CPU, compute_dtype=dtype, library=open_library(isa)))
    shape = read_shape(folder)
    return load_model(folder, shape, kernels, dtype=dtype, quantization=quantization, part=part).model


def library_cache(model: RankModel, num_blocks: int) -> KvPages:
    """A KV cache for the model, with blocks of the library's size and the type of the weights."""
    return KvPages.allocate(
        model.kv_layout,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=model.kernels.target.compute_dtype,
        device=CPU,
    )
