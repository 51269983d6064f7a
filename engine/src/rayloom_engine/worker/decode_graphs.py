"""DecodeGraphs: decode steps of a rank as CUDA graphs, so that the host launches a step by one call.

Without a graph, the host launches the hundreds of kernels of a small step more slowly than the GPU runs them. A graph
has fixed addresses and a fixed number of rows. So the inputs of a step are copied into the buffer of the smallest graph
that has enough rows, and the unused rows write no KV.

Legend: N rows of a graph, B blocks of a table, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.attention.launches import DeviceBatch
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.model import RankModel
from rayloom_engine.parallel.tensor_group import OneRank
from rayloom_engine.worker.batch import InputBatch

_MAX_ROWS = 256  # larger steps keep the GPU busy while the host launches their kernels
_ALIGNMENT = 4  # int32 numbers in 16 bytes; the kernels expect that every tensor is aligned to 16 bytes


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which there is a graph, ascending.

    There are graphs up to the first number that is at least `max_num_seqs`, but not above 256.
    """
    most = min(max_num_seqs, _MAX_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, _MAX_ROWS + 1, 16)]
    return tuple(size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < most)


class DecodeGraphs:
    """The graphs of one model and its cache."""

    def __init__(self, model: RankModel, cache: KvPages, *, max_num_seqs: int, max_context_len: int) -> None:
        """Captures all graphs. On a CPU, where kernels are interpreted, captures none, and steps run without graphs.

        `max_context_len`: the longest context, in tokens; longer contexts do not fit.
        """
        self._num_table_blocks = -(-max_context_len // cache.block_size)
        device = cache.pages[0].device
        capture: _Capture | None = None
        if device.type == "cuda":
            # All first runs are on one stream, because cuBLAS keeps memory for each stream that it has used.
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            capture = _Capture(torch.cuda.graph_pool_handle(), stream)
        # The largest graph is captured first, so that the smaller graphs reuse its memory in the pool.
        self._graphs = {
            size: _Graph(model, cache, size, self._num_table_blocks, capture)
            for size in reversed(graph_sizes(max_num_seqs))
        }
        self._sizes = sorted(self._graphs)

    def fits(self, batch: PagedBatch) -> bool:
        """True if every sequence computes one token, and a graph has enough rows and blocks for the sequences."""
        num_seqs = len(batch.query_lens)
        is_small = num_seqs <= self._sizes[-1] and batch.block_tables_SB.shape[1] <= self._num_table_blocks
        return is_small and len(batch.slot_mapping_T) == num_seqs

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Returns the hidden states [T, D] of a batch that fits; the next call overwrites them."""
        num_rows = len(batch.token_ids_T)
        size = next(size for size in self._sizes if size >= num_rows)
        return self._graphs[size].run(batch)[:num_rows]


@dataclass(frozen=True, slots=True)
class _BufferLayout:
    """The offset of each input of a step in an int32 buffer. The int64 rows come first: two elements per number."""

    num_rows: int
    num_blocks: int

    @property
    def lens(self) -> int:
        return 3 * _aligned(2 * self.num_rows)

    @property
    def tables(self) -> int:
        return self.lens + _aligned(self.num_rows)

    @property
    def end(self) -> int:
        return self.tables + self.num_rows * _aligned(self.num_blocks)

    def long(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the int64 row [N] of this index: token ids, positions or places in the cache."""
        start = index * _aligned(2 * self.num_rows)
        return buffer[start : start + 2 * self.num_rows].view(torch.int64)

    def context_lens(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.lens : self.lens + self.num_rows]

    def block_tables(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.tables : self.end].view(self.num_rows, _aligned(self.num_blocks))


@dataclass(frozen=True, slots=True)
class _Capture:
    pool: Any  # the memory that all graphs share
    stream: torch.cuda.Stream


class _Graph:
    def __init__(
        self, model: RankModel, cache: KvPages, num_rows: int, num_blocks: int, capture: _Capture | None
    ) -> None:
        device = cache.pages[0].device
        places = _BufferLayout(num_rows, num_blocks)
        host = torch.zeros(places.end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = host
        self._device = torch.zeros(places.end, dtype=torch.int32, device=device)
        self._ids_N, self._positions_N, self._cache_places_N = (places.long(host, index).numpy() for index in range(3))
        self._lens_N: npt.NDArray[np.int32] = places.context_lens(host).numpy()
        self._tables_NB: npt.NDArray[np.int32] = places.block_tables(host).numpy()
        self._lens_N[:] = 1
        self._cache_places_N[:] = -1
        self._device.copy_(host)
        token_ids_N, positions_N, cache_places_N = (places.long(self._device, index) for index in range(3))
        rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        on_device = DeviceBatch(
            tables_NB=places.block_tables(self._device),
            slots_S=rows[:num_rows],
            starts_S1=rows,
            context_lens_S=places.context_lens(self._device),
            num_seqs=num_rows,
            num_singles=num_rows,
            num_chunk_tokens=0,
            max_context_len=num_blocks * cache.block_size,
        )
        batch = AttentionBatch(
            query_lens=(1,) * num_rows,
            context_lens=(on_device.max_context_len,) * num_rows,
            block_tables_SB=on_device.tables_NB,
            slot_mapping_T=cache_places_N,
            on_device=on_device,
        )

        def compute() -> torch.Tensor:
            return model.forward(token_ids_N, positions_N, batch, cache, OneRank())

        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture is not None:
            stream = capture.stream
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                compute()  # cuBLAS chooses its kernels and allocates its memory at the first call
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=capture.pool):
                self._out_ND = compute()
            self._copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, batch: InputBatch) -> torch.Tensor:
        """Returns hidden states [N, D]: first those of the batch, then those of the unused rows."""
        num = len(batch.token_ids_T)
        paged = batch.attention
        if self._graph is not None:
            self._copied.synchronize()  # the copy of an earlier step, whose result was not read, may still run
        self._ids_N[:num] = batch.token_ids_T
        self._positions_N[:num] = batch.positions_T
        self._cache_places_N[:num] = paged.slot_mapping_T
        self._cache_places_N[num:] = -1
        self._lens_N[:num] = paged.context_lens
        self._lens_N[num:] = 1
        self._tables_NB[:num, : paged.block_tables_SB.shape[1]] = paged.block_tables_SB
        self._device.copy_(self._host, non_blocking=True)
        if self._graph is None:
            return self._compute()
        self._copied.record()
        self._graph.replay()
        return self._out_ND


def _aligned(num: int) -> int:
    return -(-num // _ALIGNMENT) * _ALIGNMENT
