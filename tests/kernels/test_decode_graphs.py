"""Decode steps in the buffers of CUDA graphs: sizes, padding rows, and results equal to those without graphs.

In the interpreter no graph is captured, but the same buffers are filled and read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.tensor_group import OneRank
from rayloom_engine.worker.batch import InputBatch
from rayloom_engine.worker.decode_graphs import graph_sizes
from rayloom_engine.worker.torch_computation import DecodeLimits, TorchComputation
from rt_tiny import tiny_checkpoint, tiny_variant
from rt_triton import DEVICE, target

BLOCK_SIZE = 16
NUM_BLOCKS = 12


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (5, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 24))],
)
def test_sizes_reach_the_largest_step(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_no_graph_has_more_than_256_rows() -> None:
    assert graph_sizes(4096)[-1] == 256


def _decodes(context_lens: list[int]) -> InputBatch:
    """A step that decodes one token of each sequence; sequence i has the blocks 2 i + 1 and 2 i + 2."""
    num = len(context_lens)
    positions_T = np.array(context_lens) - 1
    tables_SB = np.array([[2 * index + 1, 2 * index + 2] for index in range(num)])
    places_T = tables_SB[np.arange(num), positions_T // BLOCK_SIZE] * BLOCK_SIZE + positions_T % BLOCK_SIZE
    paged = PagedBatch(
        query_lens=(1,) * num, context_lens=tuple(context_lens), block_tables_SB=tables_SB, slot_mapping_T=places_T
    )
    token_ids_T = np.arange(num) * 3 + 5
    return InputBatch(
        steps=[], token_ids_T=token_ids_T, positions_T=positions_T, ends=list(range(1, num + 1)), attention=paged
    )


def test_steps_of_every_size_give_the_result_and_the_cache_without_a_graph(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "qwen3")
    kernels = choose_kernels(target("triton"))
    model = load_model(folder, read_shape(folder), kernels, dtype=torch.float32).model
    computations = []
    for limits in (None, DecodeLimits(max_num_seqs=4, max_context_len=2 * BLOCK_SIZE)):
        cache = KvPages.allocate(
            model.kv_layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE
        )
        for pages in cache.pages:
            pages.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        computations.append((TorchComputation(model, cache, limits), cache))
    # A smaller step follows a larger step. The additional rows of the larger step must not write again.
    for context_lens in ([3, 17, 30], [4], [18, 5], [5, 20, 31, 2], [6]):
        results = []
        for computation, _ in computations:
            with computation.step():
                results.append(computation.forward(_decodes(context_lens), None, OneRank(), None).clone())
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
        for without, with_graph in zip(computations[0][1].pages, computations[1][1].pages, strict=True):
            torch.testing.assert_close(with_graph, without, rtol=1e-5, atol=1e-5)


def test_a_head_size_that_the_kernels_cannot_read_has_no_graphs(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, head_dim=8)
    model = load_model(folder, read_shape(folder), choose_kernels(target("triton")), dtype=torch.float32).model
    cache = KvPages.allocate(
        model.kv_layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE
    )
    assert TorchComputation(model, cache, DecodeLimits(max_num_seqs=2, max_context_len=BLOCK_SIZE)).graphs is None


def test_chunks_and_large_steps_run_without_a_graph(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    model = load_model(folder, read_shape(folder), choose_kernels(target("triton")), dtype=torch.float32).model
    cache = KvPages.allocate(
        model.kv_layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE
    )
    graphs = TorchComputation(model, cache, DecodeLimits(max_num_seqs=2, max_context_len=BLOCK_SIZE)).graphs
    assert graphs is not None
    tables_SB = np.ones((1, 1), dtype=np.int64)

    def fits(query_len: int, tables_SB: np.ndarray) -> bool:
        lens = (query_len,) * len(tables_SB)
        places_T = np.zeros(sum(lens), dtype=np.int64)
        return graphs.fits(
            PagedBatch(query_lens=lens, context_lens=lens, block_tables_SB=tables_SB, slot_mapping_T=places_T)
        )

    assert fits(1, tables_SB)
    assert not fits(2, tables_SB)
    assert not fits(1, tables_SB.repeat(3, axis=0))
    assert not fits(1, tables_SB.repeat(2, axis=1)), "a longer context than that of the graphs"
