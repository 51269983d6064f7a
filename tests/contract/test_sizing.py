"""The operator's arithmetic of ranks is the engine's: weights, KV blocks, a step, and what it refuses."""

import dataclasses

import pytest
import torch

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.shape import ModelShape as EngineShape
from rayloom_engine.models.shape import RopeParameters, read_shape
from rayloom_engine.models.shard_counts import shard_counts
from rayloom_engine.parallel import shard as shards
from rayloom_engine.parallel.stage import make_stages, split_layers
from rayloom_engine.worker import kv_memory, start
from rayloom_operator.api.model_facts import ModelShape
from rayloom_operator.resolve import rank_memory, sizing
from rt_shapes import SHAPES
from rt_tiny import VARIANTS, tiny_variant


def engine_shape(shape):
    """What the operator knows of a shape, with values of no effect here for the rest."""
    rest = {"rms_norm_eps": 1e-5, "rope": RopeParameters(), "layer_windows": (shape.attention_span,) * shape.num_layers}
    return EngineShape(**shape.model_dump(exclude={"attention_span"}), **rest, eos_token_ids=())


def known(shape):
    """What the operator knows of one of the engine's."""
    return ModelShape.model_validate({**dataclasses.asdict(shape), "attention_span": shape.attention_span})


def largest_rank(shape, tensor, pipeline):
    """Weights of every rank, as the engine would allocate them, and of its KV blocks; the largest of each."""
    weights, blocks = [], []
    for stage in make_stages(shape.num_layers, pipeline, shape.head_layers):
        for index in range(tensor):
            shard = shards.Shard(index, tensor)
            device, dtype = torch.device("meta"), torch.bfloat16
            model, _ = empty_model(shape, stage, shard, device=device, compute_dtype=dtype)
            weights.append(model.weight_bytes)
            kv_heads = len(shard.kv_heads(shape.num_kv_heads))
            per_layer_and_head = shape.kv_bytes_per_token(2) // (shape.num_layers * shape.num_kv_heads)
            blocks.append(BLOCK_SIZE * per_layer_and_head * len(stage.layers) * kv_heads)
    return max(weights), max(blocks)


def same(shape, tensor, pipeline):
    found = rank_memory.ranks(known(shape), tensor, pipeline)
    ours = 2 * max(rank.weights for rank in found), 2 * max(rank.kv_block for rank in found)
    return ours == largest_rank(shape, tensor, pipeline)


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_of_known_models_are_the_engines(name):
    shape = engine_shape(SHAPES[name])
    (rank,) = rank_memory.ranks(SHAPES[name], 1, 1)

    assert rank.weights * 2 == shape.weight_bytes(2)
    assert rank.kv_block * 2 == BLOCK_SIZE * shape.kv_bytes_per_token(2)
    for tensor in rank_memory.shard_counts(SHAPES[name]):
        assert same(shape, tensor, 1) and same(shape, tensor, 2)
    assert same(shape, 1, 3) and same(shape, 1, shape.num_layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_of_checkpoints_of_every_architecture_are_the_engines(variant, tmp_path):
    shape = read_shape(tiny_variant(tmp_path, variant))
    (rank,) = rank_memory.ranks(known(shape), 1, 1)

    assert rank.weights * 4 == shape.weight_bytes(4)
    for tensor in shard_counts(shape):
        assert same(shape, tensor, 1) and same(shape, tensor, 2)


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_numbers_of_ranks_can_share_a_layer(name):
    assert rank_memory.shard_counts(SHAPES[name]) == shard_counts(engine_shape(SHAPES[name]))


def test_stages_have_the_engines_layers():
    for num_layers in (1, 2, 5, 30, 80):
        for num_stages in range(1, num_layers + 1):
            for head in (0.0, 0.6, 4.0):
                theirs = tuple(map(len, split_layers(num_layers, num_stages, head)))
                assert rank_memory.split_layers(num_layers, num_stages, head) == theirs


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_takes_what_the_engine_keeps_free_for_it(name):
    settings = {"element_bytes": 2, "num_tokens": 8192, "num_seqs": 64}

    assert rank_memory.step_bytes(SHAPES[name], 1, **settings) == kv_memory.step_bytes(
        engine_shape(SHAPES[name]), 1, **settings
    )


def test_defaults_and_shares_are_the_engines():
    assert EngineConfig().max_num_seqs == sizing.MAX_NUM_SEQS
    assert sizing.GPU_STEP_TOKENS == start._GPU_STEP_TOKENS
    assert sizing.CPU_STEP_TOKENS == start._CPU_STEP_TOKENS
    assert rank_memory.BLOCK_SIZE == BLOCK_SIZE
    assert (sizing.GPU_SHARE, sizing.CPU_SHARE, sizing.CPU_CAP) == (
        kv_memory._GPU_SHARE,
        kv_memory._CPU_SHARE,
        kv_memory._CPU_CAP,
    )


@pytest.mark.parametrize("span", [None, 1, 17, 4096])
@pytest.mark.parametrize("num_step_tokens", [None, 512])
def test_a_sequence_takes_the_engines_number_of_blocks(span, num_step_tokens):
    shape = next(iter(SHAPES.values())).model_copy(update={"attention_span": span})
    settings = {"per_node": 1, "memory": None, "tensor": 1, "pipeline": 1, "max_model_len": None, "num_requests": 1}
    question = sizing.Question(shape=shape, dtype="bfloat16", num_step_tokens=num_step_tokens, **settings)
    engine = kv_memory.SequenceBlocks(
        block_size=BLOCK_SIZE, window=span, num_step_tokens=num_step_tokens or start._GPU_STEP_TOKENS
    )
    for num_tokens in (1, 16, 17, 512, 4096, 8192, 40_000, 131_072):
        assert question.num_blocks_of(num_tokens) == engine.most(num_tokens)
