"""A rank's part of a model on the C library: numpy arrays, no torch.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayloom_engine.config import Quantization
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, are_finite
from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.kv.library_host import LibraryHostBlocks
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.models.adapters.memory import adapter_bytes
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.given_rows import given_rows
from rayloom_engine.models.largest_step import LargestStep, StepBytes
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE, HIDDEN_TYPE, LibraryDecoder
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.models.on_library.matrix import WeightFormat
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.step_memory import LibraryArithmetic, library_step_bytes
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import TensorGroup
from rayloom_engine.worker.batch import InputBatch
from rayloom_engine.worker.cpu_sampler import CpuSampler
from rayloom_engine.worker.host_memory import RankHostMemory
from rayloom_engine.worker.machine import free_memory_bytes

FloatArray = npt.NDArray[np.float32]

_NOTHING = contextlib.nullcontext()


class LibraryComputation:
    """Implements RankComputation. Hidden states after the final norm have the type that the head multiplies."""

    def __init__(self, decoder: LibraryDecoder, cache: LibraryPages, num_columns: int | None = None) -> None:
        """`num_columns`: as for LoadedPart.computation."""
        self._decoder = decoder
        self._cache = cache
        self._num_columns = num_columns or decoder.shape.vocab_size
        self._sampler = CpuSampler(decoder.library, self._num_columns)
        self.num_blocks = cache.num_blocks
        self.clear_blocks = cache.clear_blocks
        self.copy_blocks = cache.copy_blocks
        self.load_adapter = decoder.load_adapter
        has_all_columns = self._num_columns == decoder.shape.vocab_size
        self.logits = decoder.logits if has_all_columns else self._fitted_logits
        self.sample = self._sampler.__call__
        self.describe = self._sampler.describe

    def use_host_memory(self, host: RankHostMemory) -> None:
        blocks = LibraryHostBlocks(host.memory, self._cache, host.num_slots)
        self.store_blocks = blocks.store
        self.load_blocks = blocks.load

    def step(self) -> contextlib.nullcontext[None]:
        return _NOTHING

    def forward(
        self,
        batch: InputBatch,
        received_TD: Array | None,
        group: TensorGroup[Array],
        wanted_rows: Sequence[int] | None,
    ) -> Array:
        inputs = batch.token_ids_T if received_TD is None else received_TD
        given = None if received_TD is not None else given_rows(batch.embeds)  # later stages look up no rows
        return self._decoder.forward(inputs, batch.positions_T, batch.attention, self._cache, group, wanted_rows, given)

    def _fitted_logits(self, hidden_ND: Array) -> FloatArray:
        """Returns the logits with `num_columns` columns."""
        logits_NV = self._decoder.logits(hidden_ND)
        num = min(self._num_columns, logits_NV.shape[1])
        fitted_NV = np.full((len(logits_NV), self._num_columns), -np.inf, dtype=np.float32)
        fitted_NV[:, :num] = logits_NV[:, :num]
        return fitted_NV

    def rows(self, array: Array, rows: Sequence[int]) -> Array:
        return array.take(rows, axis=0)

    def span(self, array: Array, start: int, stop: int) -> Array:
        return array[start:stop]

    def are_finite(self, hidden_ND: Array) -> bool:
        return are_finite(hidden_ND)

    def have_tokens(self, logits_NV: FloatArray) -> bool:
        return bool(np.isfinite(logits_NV.max(axis=-1)).all())

    def values(self, logits_NV: FloatArray, row: int, token_ids: Sequence[int]) -> list[float]:
        found: list[float] = logits_NV[row].take(token_ids).tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPart:
    """Implements LoadedPart."""

    model: LibraryDecoder
    num_bytes_read: int

    device_type = "cpu"
    has_numpy_arrays = True
    hidden_dtype = HIDDEN_TYPE

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def part(self) -> ModelPart:
        return self.model.part

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def quantization(self) -> str:
        return self.model.quantization

    @property
    def compute_dtype(self) -> str:
        return self.model.library.operand_dtype(self.model.dtype)

    @property
    def arithmetic(self) -> str:
        library = self.model.library
        return f"C library {library.build}, {library.instruction_set}"

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def kv_layout(self) -> KvLayout:
        return self.model.kv_layout

    @property
    def kv_element_bytes(self) -> int:
        return ELEMENTS[self.model.dtype].itemsize

    @property
    def progress(self) -> int:
        return self.model.progress

    def free_bytes(self, num_sharing: int) -> int:
        return free_memory_bytes() // num_sharing

    def step_bytes(self, step: LargestStep) -> StepBytes:
        library = self.model.library
        arithmetic = LibraryArithmetic(
            operand_bytes=ELEMENTS[library.operand_dtype(self.model.dtype)].itemsize,
            num_threads=library.num_threads,
            is_quantised=self.quantization != "none",
        )
        return library_step_bytes(self.shape, self.part.shard.count, step, arithmetic)

    def adapter_bytes(self, rank: int) -> int:
        model = self.model
        element_bytes = ELEMENTS[model.dtype].itemsize
        return adapter_bytes(model.shape, model.part, rank, element_bytes=element_bytes, cut_unit=model.cut_unit)

    def computation(self, num_blocks: int, num_columns: int | None = None) -> LibraryComputation:
        model = self.model
        pages = LibraryPages.allocate(model.kv_layout, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype)
        return LibraryComputation(model, pages, num_columns)


def weight_format(library: CpuLibrary, dtype: str, quantization: Quantization) -> WeightFormat:
    """Returns the format in which the library stores weights. Raises ValueError for a type without kernels."""
    for element_type in ELEMENTS:
        if element_type == dtype:
            return WeightFormat(library=library, dtype=element_type, quantization=quantization)
    raise ValueError(f"the library has no kernels for {dtype}")


def load_library_part(
    folder: Path, shape: ModelShape, form: WeightFormat, part: ModelPart, progress: Progress
) -> LibraryPart:
    """Loads a rank's part of a model that the library can compute. Raises ModelError."""
    loaded = load_decoder(folder, shape, form, part=part, progress=progress)
    return LibraryPart(model=loaded.decoder, num_bytes_read=loaded.num_bytes_read)
