"""Attention sinks in the native decoder on torch: logits of transformers, the part of each rank, and sizes.

test_cpu_sinks.py tests the C library. test_paged_attention.py and tests/kernels/ test attention alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.kernels.backend import Backend
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.decoder_spec import VectorSpec, checkpoint_sizes, decoder_spec
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import whole_model
from rt_sinks import NUM_LAYERS, SinkModel, sink_model
from rt_thread_group import ThreadGroup, on_ranks
from rt_tiny import VOCAB_SIZE, TinySequence, advance, logits_of, make_batch, make_cache

NUM_TOKENS = 50
TOKEN_IDS = random.Random(3).choices(range(VOCAB_SIZE), k=NUM_TOKENS)
BLOCKS = range(-(-NUM_TOKENS // 4))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[SinkModel, Any]:
    return sink_model(tmp_path_factory.mktemp("sinks"))


@pytest.mark.parametrize("backend", ["plain", "reference"])
def test_logits_are_those_of_transformers(models: tuple[SinkModel, Any], backend: Backend) -> None:
    ours, theirs = models
    model = ours.on_torch(backend=backend)
    cache = make_cache(ours.shape)
    sequence = TinySequence(TOKEN_IDS, BLOCKS)
    found = torch.cat([advance(model, cache, [(sequence, count)])[0] for count in (33, 1, 1, 15)])
    expected = logits_of(theirs, TOKEN_IDS)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_two_ranks_have_the_logits_of_one(models: tuple[SinkModel, Any]) -> None:
    ours, _ = models
    whole = ours.on_torch()
    (expected,) = advance(whole, make_cache(ours.shape), [(TinySequence(TOKEN_IDS, BLOCKS), NUM_TOKENS)])
    ranks = [ours.on_torch(part=ModelPart(whole_model(NUM_LAYERS), Shard(index, 2))) for index in range(2)]
    batch = make_batch([NUM_TOKENS], [NUM_TOKENS], [BLOCKS])

    def logits(rank: Any, group: ThreadGroup) -> torch.Tensor:
        cache = type(make_cache(ours.shape)).allocate(
            rank.kv_layout, num_blocks=len(BLOCKS), block_size=4, dtype=torch.float32, device=torch.device("cpu")
        )
        positions_T = torch.arange(NUM_TOKENS)
        return rank.logits(rank.forward(torch.tensor(TOKEN_IDS), positions_T, batch, cache, group))

    parts = on_ranks([lambda group, rank=rank: logits(rank, group) for rank in ranks])
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=0)


def test_a_rank_holds_the_sinks_of_its_query_heads(models: tuple[SinkModel, Any]) -> None:
    shape = models[0].shape
    of_ranks = [
        decoder_spec(shape, ModelPart(whole_model(NUM_LAYERS), Shard(index, 2))).layers[1].sinks for index in range(2)
    ]
    name = "model.layers.1.self_attn.sinks"
    assert of_ranks == [VectorSpec(name, 2, (slice(0, 2),)), VectorSpec(name, 2, (slice(2, 4),))]
    assert checkpoint_sizes(shape)[name] == (4,)


def test_sinks_count_as_weights(models: tuple[SinkModel, Any], tmp_path: Path) -> None:
    ours, theirs = models
    assert ours.shape.num_parameters == sum(each.numel() for each in theirs.parameters())
    without = ours.without_sinks(tmp_path)
    assert ours.shape.num_parameters - without.shape.num_parameters == 4 * NUM_LAYERS
    with_sinks, without_sinks = (model_costs(each.shape, (1, 2)).kinds for each in (ours, without))
    for kind, kind_without in zip(with_sinks, without_sinks, strict=True):
        (one, two), (one_without, two_without) = kind.weights.elements, kind_without.weights.elements
        assert (one - one_without, two - two_without) == (4, 2)
    assert ours.on_torch().weight_bytes == 4 * ours.shape.num_parameters


def test_sinks_are_float32_with_the_values_of_the_weights_type(models: tuple[SinkModel, Any]) -> None:
    loaded: Any = models[0].on_torch(torch.bfloat16, compute_dtype=torch.bfloat16)
    sinks_H = loaded._weights.layers[0].attention.sinks_H
    # The checkpoint has -2, 3.6667, 9.3333 and 15. Between 2 and 4 bfloat16 numbers are multiples of 1/64.
    assert sinks_H.dtype is torch.float32
    assert sinks_H.tolist() == [-2.0, 3 + 43 / 64, 9 + 5 / 16, 15.0]
