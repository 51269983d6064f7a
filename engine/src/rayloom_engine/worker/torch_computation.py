"""A rank's part of a model on torch: on every GPU, and on a CPU if the C library does not compute the model.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.errors import ModelError
from rayloom_engine.kernels.attention import AttentionBatch, reads_on_device
from rayloom_engine.kernels.backend import Backend
from rayloom_engine.kernels.kernel_set import KernelSet, choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.host_blocks import HostBlocks, pin
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.kv.memory import share_of_gpu
from rayloom_engine.models.adapters.memory import adapter_bytes
from rayloom_engine.models.adapters.support import needs_native
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.given_rows import GivenRows, given_rows
from rayloom_engine.models.largest_step import LargestStep, StepBytes
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.step_memory import step_bytes
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import TensorGroup
from rayloom_engine.worker.batch import InputBatch
from rayloom_engine.worker.decode_graphs import DecodeGraphs
from rayloom_engine.worker.machine import free_memory_bytes
from rayloom_engine.worker.sampler import Sampler, are_finite

if TYPE_CHECKING:
    from rayloom_engine.worker.gpu_sampler import GpuSampler
    from rayloom_engine.worker.host_memory import RankHostMemory
    from rayloom_engine.worker.part_loading import PartToLoad

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The largest decode step of an engine."""

    max_num_seqs: int
    max_context_len: int


class TorchComputation:
    """Implements RankComputation."""

    def __init__(
        self, model: RankModel, cache: KvPages, limits: DecodeLimits | None = None, num_columns: int | None = None
    ) -> None:
        """`limits`: the largest decode step that runs as a CUDA graph; None: no graphs.

        `num_columns`: as for LoadedPart.computation.
        """
        self.num_blocks = cache.num_blocks
        self.clear_blocks = cache.clear_blocks
        self.copy_blocks = cache.copy_blocks
        self._num_columns = num_columns or model.shape.vocab_size
        has_all_columns = self._num_columns == model.shape.vocab_size
        self.logits = model.logits if has_all_columns else self._fitted_logits
        self._model = model
        self._cache = cache
        self._device = model.kernels.target.device
        model.warm_up(cache)
        self.sample = choose_sampler(self._num_columns, model.kernels.target)
        self._adapters = getattr(model, "adapters", None)  # None: adapters cannot change this kind of model
        self.graphs: DecodeGraphs | None = None
        is_whole = model.part.stage.count == model.part.shard.count == 1
        # The code of experts reads tensors on the host, and modules of transformers may do so. A graph would not repeat
        # these reads.
        can_repeat = is_whole and not isinstance(model.shape, MeasuredShape) and model.shape.experts is None
        if limits is not None and can_repeat and reads_on_device(model.kernels.target, cache.pages[0]):
            with self.step():
                self.graphs = DecodeGraphs(
                    model, cache, max_num_seqs=limits.max_num_seqs, max_context_len=limits.max_context_len
                )

    def use_host_memory(self, host: RankHostMemory) -> None:
        if host.is_pinned is None:  # once, because a second call of CUDA fails
            host.is_pinned = self._device.type == "cuda" and pin(host.memory)
        blocks = HostBlocks(host.memory, self._cache, host.num_slots, is_pinned=host.is_pinned)
        self.store_blocks = blocks.store
        self.load_blocks = blocks.load

    def step(self) -> AbstractContextManager[object]:
        return torch.inference_mode()  # small calls take a fifth less time than with no_grad

    def load_adapter(self, load: AdapterLoad) -> None:
        if self._adapters is None:
            raise ModelError(f"{load.adapter.path}: {needs_native(self._model.shape.architecture)}", "Unsupported")
        self._adapters.load(load.slot, load.adapter)

    def forward(
        self,
        batch: InputBatch,
        received_TD: torch.Tensor | None,
        group: TensorGroup[torch.Tensor],
        wanted_rows: Sequence[int] | None,
    ) -> torch.Tensor:
        can_repeat = received_TD is None and not batch.embeds  # a graph looks up the rows of all tokens
        if self.graphs is not None and can_repeat and self.graphs.fits(batch.attention):
            return self.graphs.forward(batch)
        if self._adapters is not None:
            self._adapters.begin_step(batch.attention.adapters_T)
        device = self._device
        inputs = torch.from_numpy(batch.token_ids_T).to(device) if received_TD is None else received_TD
        attention = AttentionBatch(
            query_lens=batch.attention.query_lens,
            context_lens=batch.attention.context_lens,
            block_tables_SB=torch.from_numpy(batch.attention.block_tables_SB).to(device),
            slot_mapping_T=torch.from_numpy(batch.attention.slot_mapping_T).to(device),
        )
        positions_T = torch.from_numpy(batch.positions_T).to(device)
        # Later stages look up no rows.
        given = None if received_TD is not None else _on_device(given_rows(batch.embeds), device)
        return self._model.forward(inputs, positions_T, attention, self._cache, group, wanted_rows, given)

    def _fitted_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Returns the logits with `num_columns` columns."""
        logits_NV = self._model.logits(hidden_ND)
        num = min(self._num_columns, logits_NV.shape[1])
        fitted_NV = logits_NV.new_full((len(logits_NV), self._num_columns), -torch.inf)
        fitted_NV[:, :num] = logits_NV[:, :num]
        return fitted_NV

    def rows(self, array: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return array[torch.tensor(rows, device=array.device)]

    def span(self, array: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return array[start:stop]

    def are_finite(self, hidden_ND: torch.Tensor) -> bool:
        return bool(hidden_ND.isfinite().all())

    def have_tokens(self, logits_NV: torch.Tensor) -> bool:
        return are_finite(logits_NV)

    def describe(self, logits_NV: torch.Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        return self.sample.describe(logits_NV, token_ids, num_tops)

    def values(self, logits_NV: torch.Tensor, row: int, token_ids: Sequence[int]) -> list[float]:
        found: list[float] = logits_NV[row, torch.tensor(token_ids, device=logits_NV.device)].tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPart:
    """Implements LoadedPart."""

    model: RankModel
    num_bytes_read: int
    dtype: str
    compute_dtype: str
    limits: DecodeLimits | None = None

    has_numpy_arrays = False

    @property
    def arithmetic(self) -> str:
        """Names the code and the hardware that compute: torch has other kernels for other hardware."""
        target = self.model.kernels.target
        device = target.device
        is_cpu = device.type == "cpu"
        hardware = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device)
        kernels = f", Triton {version('triton')}" if uses_triton(target) else ""
        on_torch = f"torch {torch.__version__}{kernels}, {hardware}"
        is_ours = not isinstance(self.shape, MeasuredShape)
        return on_torch if is_ours else f"transformers {version('transformers')}, {on_torch}"

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def part(self) -> ModelPart:
        return self.model.part

    @property
    def device_type(self) -> str:
        return self.model.kernels.target.device.type

    @property
    def quantization(self) -> str:
        return "none"

    @property
    def hidden_dtype(self) -> str:
        return _name(self.model.hidden_dtype)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def kv_layout(self) -> KvLayout:
        return self.model.kv_layout

    @property
    def kv_element_bytes(self) -> int:
        return _DTYPES[self.dtype].itemsize

    @property
    def progress(self) -> int:
        return 0

    def free_bytes(self, num_sharing: int) -> int:
        device = self.model.kernels.target.device
        if device.type == "cpu":
            return free_memory_bytes() // num_sharing
        return share_of_gpu(*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device), num_sharing)

    def step_bytes(self, step: LargestStep) -> StepBytes:
        num_bytes = step_bytes(
            self.shape,
            self.part.shard.count,
            element_bytes=_DTYPES[self.compute_dtype].itemsize,
            num_tokens=step.num_tokens,
            num_seqs=step.num_rows,
        )
        return StepBytes(usual=num_bytes, most=num_bytes)

    def adapter_bytes(self, rank: int) -> int:
        element_bytes = _DTYPES[self.compute_dtype].itemsize  # adapters have the type of activations
        return adapter_bytes(self.shape, self.part, rank, element_bytes=element_bytes)

    def computation(self, num_blocks: int, num_columns: int | None = None) -> TorchComputation:
        try:
            cache = KvPages.allocate(
                self.model.kv_layout,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                # The weights' type, even if the compute type is wider: the wider type would need twice the memory.
                dtype=_DTYPES[self.dtype],
                device=self.model.kernels.target.device,
            )
            limits = self.limits
            if limits is not None:
                longest = min(limits.max_context_len, num_blocks * BLOCK_SIZE)
                limits = dataclasses.replace(limits, max_context_len=longest)
            return TorchComputation(self.model, cache, limits, num_columns)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTypes:
    """The types with which torch computes, as names, and the reason for them.

    `dtype`: the type to which the weights are rounded. `compute_dtype`: the type of activations and of weights in
    memory.
    """

    dtype: str
    compute_dtype: str
    reason: str


def has_cuda() -> bool:
    """Returns whether torch can use a CUDA device."""
    return torch.cuda.is_available()


def choose_types(device: str, dtype: str) -> TorchTypes:
    """Returns the types for weights of type `dtype` on cpu or cuda."""
    compute_dtype, reason = (dtype, f"{device} computes in {dtype}") if device != "cpu" else _cpu_dtype(dtype)
    return TorchTypes(dtype=dtype, compute_dtype=compute_dtype, reason=reason)


def make_kernels(device: str, types: TorchTypes, backend: Backend, num_threads: int) -> KernelSet:
    """Chooses the kernels, and sets the number of torch's threads."""
    torch.set_num_threads(num_threads)
    target = Target(device=torch.device(device), compute_dtype=_DTYPES[types.compute_dtype], backend=backend)
    return choose_kernels(target)


def load_torch_part(
    wanted: PartToLoad, kernels: KernelSet, types: TorchTypes, limits: DecodeLimits | None, progress: Progress
) -> TorchPart:
    """Loads a rank's part of a model. Raises ModelError. `limits`: see TorchComputation."""
    folder, shape, part = wanted.folder, wanted.shape, wanted.part
    loaded = load_model(folder, shape, kernels, dtype=_DTYPES[types.dtype], part=part, progress=progress)
    return TorchPart(
        model=loaded.model,
        num_bytes_read=loaded.num_bytes_read,
        dtype=types.dtype,
        compute_dtype=types.compute_dtype,
        limits=limits,
    )


def choose_sampler(vocab_size: int, target: Target) -> Sampler | GpuSampler:
    """Returns the sampler of a rank: a GpuSampler if Triton's kernels compute the model, else a Sampler."""
    if not uses_triton(target):
        return Sampler(vocab_size, target.device)
    from rayloom_engine.worker.gpu_sampler import GpuSampler

    sampler = GpuSampler(vocab_size, target.device)
    sampler.warm_up()
    return sampler


def _cpu_dtype(name: str) -> tuple[str, str]:
    if name == "float32":
        return name, "float32 everywhere"
    ops = torch.ops.mkldnn
    if ops._is_mkldnn_bf16_supported() if name == "bfloat16" else ops._is_mkldnn_fp16_supported():
        return name, f"this CPU has {name} instructions"
    # Without these instructions torch converts element by element. A product then takes 2.4 times as long as in float32
    # at 16 rows, and 4.8 times as long at 64 rows.
    return "float32", f"this CPU has no {name} instructions, so the weights are widened to float32"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on_device(given: GivenRows[npt.NDArray[Any]] | None, device: torch.device) -> GivenRows[torch.Tensor] | None:
    if given is None:
        return None
    return GivenRows(torch.from_numpy(given.rows_G).to(device), torch.from_numpy(given.embeds_GD).to(device))
