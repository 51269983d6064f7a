"""Models on the C library, with every instruction set that this CPU can run.

Without a C++ compiler `ISAS` is empty, and tests that are parametrised by `ISAS` are skipped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayloom_engine.config import Quantization
from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.cpu_library.library import CpuLibrary, LibraryFunctions
from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE, LibraryDecoder
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import OneRank
from rayloom_engine.worker.library_computation import weight_format


@functools.cache
def library_functions() -> LibraryFunctions | None:
    path = find_library(cache_folder(os.environ), os.environ).path
    return None if path is None else LibraryFunctions(path)


def _instruction_sets() -> tuple[str, ...]:
    functions = library_functions()
    return () if functions is None else functions.instruction_sets


ISAS = _instruction_sets()


def open_library(isa: str, num_threads: int = 2) -> CpuLibrary:
    """The library with an instruction set. By default it has several threads, which share the work of attention."""
    functions = library_functions()
    assert functions is not None
    library = CpuLibrary(functions, isa)
    library.start_threads(num_threads, pin=False)
    return library


def to_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array for the library: bfloat16 becomes uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def to_torch(array: Array) -> torch.Tensor:
    """The array's memory as a tensor: uint16 becomes bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


class LibraryModel:
    """A decoder on the library for tests with torch: its methods take and return tensors."""

    def __init__(self, decoder: LibraryDecoder) -> None:
        self.decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: LibraryPages,
        group: OneRank,
        wanted_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        paged = PagedBatch(
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            block_tables_SB=to_numpy(batch.block_tables_SB),
            slot_mapping_T=to_numpy(batch.slot_mapping_T),
        )
        hidden_TD = self.decoder.forward(to_numpy(inputs), to_numpy(positions_T), paged, cache, group, wanted_rows)
        return to_torch(hidden_TD)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return to_torch(self.decoder.logits(to_numpy(hidden_ND.contiguous())))


def load_on_library(
    folder: Path,
    isa: str,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    quantization: Quantization = "none",
) -> LibraryModel:
    form = weight_format(open_library(isa), type_name(dtype), quantization)
    return LibraryModel(load_decoder(folder, read_shape(folder), form, part=part).decoder)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def library_cache(model: LibraryModel, num_blocks: int) -> LibraryPages:
    """A KV cache for the model: blocks of the library's size, in the type of the weights."""
    return LibraryPages.allocate(
        model.kv_layout, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.decoder.dtype
    )
