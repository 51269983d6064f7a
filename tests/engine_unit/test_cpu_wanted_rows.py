"""On the C library the last layer computes only the rows that the caller wants. The bits are those of a full step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rayloom_engine.parallel.tensor_group import OneRank
from rt_library import ISAS, LibraryModel, library_cache, load_on_library, open_library
from rt_tiny import VOCAB_SIZE, make_batch, tiny_variant

NUM_BLOCKS = 24
VARIANTS = ("llama-biases", "gemma2", "qwen3-biases", "mixtral")


@pytest.fixture(scope="module", params=[(isa, each) for isa in ISAS for each in ("none", "int8")], ids=str)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[LibraryModel]:
    isa, quantization = request.param
    folders = [tiny_variant(tmp_path_factory.mktemp(variant), variant) for variant in VARIANTS]
    return [load_on_library(folder, isa, torch.bfloat16, quantization=quantization) for folder in folders]


def compute(
    model: LibraryModel, query_lens: list[int], context_lens: list[int], wanted: list[int] | None
) -> tuple[torch.Tensor, LibraryPages]:
    """Computes one step of sequences whose earlier positions hold zeros. Returns the hidden states, and the cache."""
    cache = library_cache(model, len(query_lens) * NUM_BLOCKS)
    tables = [range(index * NUM_BLOCKS, (index + 1) * NUM_BLOCKS) for index in range(len(query_lens))]
    batch = make_batch(query_lens, context_lens, tables, BLOCK_SIZE)
    positions = [
        position
        for query_len, context_len in zip(query_lens, context_lens, strict=True)
        for position in range(context_len - query_len, context_len)
    ]
    ids = random.Random(5).choices(range(VOCAB_SIZE), k=len(positions))
    hidden_TD = model.forward(torch.tensor(ids), torch.tensor(positions), batch, cache, OneRank(), wanted)
    return hidden_TD, cache


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wanted_rows_and_cache_are_the_same_without_the_other_rows(
    models: list[LibraryModel], data: st.DataObject
) -> None:
    model = data.draw(st.sampled_from(models), label="model")
    open_library(ISAS[0], data.draw(st.integers(1, 3), label="threads"))
    query_lens = data.draw(st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=4), label="tokens")
    context_lens = [length + data.draw(st.integers(0, 280), label="earlier") for length in query_lens]
    wanted = sorted(data.draw(st.sets(st.integers(0, sum(query_lens) - 1)), label="wanted"))
    expected_TD, expected_cache = compute(model, query_lens, context_lens, None)
    hidden_TD, cache = compute(model, query_lens, context_lens, wanted)
    assert torch.equal(hidden_TD[wanted], expected_TD[wanted])
    assert all(map(np.array_equal, cache.pages, expected_cache.pages))


def test_the_other_rows_are_left_out(models: list[LibraryModel]) -> None:
    for model in models:
        expected_TD, _ = compute(model, [3], [3], None)
        hidden_TD, _ = compute(model, [3], [3], [2])
        assert torch.equal(hidden_TD[2], expected_TD[2])
        assert not torch.equal(hidden_TD[0], expected_TD[0])
