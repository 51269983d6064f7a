"""The memory of a step on the C library: what the library takes for its buffers, and what a rank keeps free for them.

Left out are the buffers of adapters, and steps that several ranks share.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from rayloom_engine.config import Quantization
from rayloom_engine.cpu_library.arrays import ELEMENTS
from rayloom_engine.models.experts import Experts
from rayloom_engine.models.largest_step import LargestStep
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rayloom_engine.models.shape import read_shape
from rayloom_engine.models.step_memory import LibraryArithmetic, library_buffer_bytes, library_step_bytes
from rayloom_engine.parallel.tensor_group import OneRank
from rt_library import ISAS, LibraryModel, library_cache, load_on_library, open_library
from rt_tiny import VOCAB_SIZE, make_batch, tiny_checkpoint, tiny_variant

SLACK = 128 << 10  # bytes that are counted whatever the step
VARIANTS = ("llama-biases", "gemma2", "mixtral", "qwen2-moe", "gpt-oss")


def compute(model: LibraryModel, lengths: list[tuple[int, int]]) -> tuple[int, LargestStep]:
    """Computes a step of sequences with these (query, context) lengths, of each of which the last row is wanted.

    Returns the bytes of the library's buffers, and the sizes of the step.
    """
    query_lens, context_lens = [query for query, _ in lengths], [context for _, context in lengths]
    num_blocks = -(-max(context_lens) // BLOCK_SIZE)
    cache = library_cache(model, num_blocks)
    batch = make_batch(query_lens, context_lens, [range(num_blocks)] * len(lengths), BLOCK_SIZE)
    positions = [position for query, context in lengths for position in range(context - query, context)]
    ids = random.Random(5).choices(range(VOCAB_SIZE), k=len(positions))
    wanted = [sum(query_lens[: index + 1]) - 1 for index in range(len(lengths))]
    model.forward(torch.tensor(ids), torch.tensor(positions), batch, cache, OneRank(), wanted)
    step = LargestStep(num_tokens=len(ids), num_rows=len(wanted), context_len=max(context_lens))
    return model.library.buffer_bytes, step


def arithmetic_of(model: LibraryModel) -> LibraryArithmetic:
    return LibraryArithmetic(
        operand_bytes=ELEMENTS[model.library.operand_dtype(model.dtype)].itemsize,
        num_threads=model.library.num_threads,
        is_quantised=model.quantization != "none",
    )


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    "lengths",
    [[(900, 900)], [(500, 700), *[(1, 300)] * 12], [(1, 300)] * 200, [(2, 300)] * 100],
    ids=["prompt", "prompt and decodes", "decodes", "many wanted rows"],
)
def test_the_buffers_of_a_step_take_what_is_counted(
    folder: Path, isa: str, quantization: Quantization, lengths: list[tuple[int, int]]
) -> None:
    model = load_on_library(folder, isa, torch.bfloat16, quantization=quantization)
    open_library(isa, num_threads=1)  # one thread cuts no tile of attention
    model.library.num_threads = 1
    taken, step = compute(model, lengths)
    counted = library_buffer_bytes(read_shape(folder), 1, step, arithmetic_of(model))
    assert taken <= counted
    if lengths[0][0] > 1 and len(lengths) < 100:  # the count assumes that all tokens may be decodes
        assert counted - SLACK <= 1.4 * taken


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_the_results_of_a_long_context_are_counted(tmp_path: Path, isa: str, num_threads: int) -> None:
    """The more tokens, the more results, until there are enough tiles for the threads."""
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=8192)
    model = load_on_library(folder, isa, torch.float32)
    open_library(isa, num_threads)
    model.library.num_threads = num_threads
    shape = read_shape(folder)
    taken, counted, of_results = [], [], []
    for num_tokens in (1, 8, 40, 80, 90, 130, 140, 200):
        num_bytes, step = compute(model, [(num_tokens, 8192)])
        taken.append(num_bytes)
        counted.append(library_buffer_bytes(shape, 1, step, arithmetic_of(model)))
        alone = library_buffer_bytes(shape, 1, step, dataclasses.replace(arithmetic_of(model), num_threads=1))
        of_results.append(counted[-1] - alone)
    assert [mine >= theirs for mine, theirs in zip(counted, taken, strict=True)] == [True] * len(taken)
    largest = taken.index(max(taken))
    assert taken[largest] > 2 * taken[-1], "200 tokens have enough tiles, and no results"
    assert counted[largest] - of_results[largest] < taken[largest], "the other buffers are a small part"
    assert counted[largest] - SLACK <= 1.5 * taken[largest]


def test_the_results_have_a_limit_for_each_part_of_the_step(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    shape = dataclasses.replace(read_shape(folder), num_heads=32, num_kv_heads=8, head_dim=128)
    one = LibraryArithmetic(operand_bytes=2, num_threads=1, is_quantised=False)
    many = dataclasses.replace(one, num_threads=64)
    step = LargestStep(num_tokens=8192, num_rows=1, context_len=131_072)  # 512 segments
    limit = 256 * 1024 * 1024  # fewer bytes than the 8 x 64 tiles of 24 rows have
    of_last_row = 32 * 512 * 128 * 4  # heads, segments, head size, bytes of a float32
    expected = (limit + of_last_row) * 130 // 128  # each row of 128 values has two numbers more
    assert library_buffer_bytes(shape, 1, step, many) - library_buffer_bytes(shape, 1, step, one) == expected
    with_results, without = library_step_bytes(shape, 1, step, many), library_step_bytes(shape, 1, step, one)
    assert with_results.most - without.most == expected
    assert with_results.usual == without.usual < without.most


def test_quantised_experts_are_cut_between_groups() -> None:
    # gpt-oss: 2880 elements are 90 groups of 32. The largest of 8 ranks has 12 groups; a token has 4 experts.
    experts = Experts(num_experts=32, num_experts_per_token=4, moe_intermediate_size=2880, normalises_weights=True)
    assert experts.active_size(8, cut_unit=32) == 4 * 384
    assert experts.active_size(8) == 4 * 360
    assert experts.active_size(1, cut_unit=32) == 4 * 2880
