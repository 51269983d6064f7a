"""The costs in `inspect`'s output equal the engine's allocations, and the operator splits layers like the engine.

The operator only adds these costs, so it has no formulas for models that could be compared with the engine's. Other
files test how the operator compares sums with memory (tests/operator_unit/test_sizing.py), and the transfer of the
document (test_inspection.py).
"""

import pytest
import torch

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv import memory as kv_memory
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.models.shard_counts import shard_counts
from rayloom_engine.models.step_memory import step_bytes
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import make_stages, split_layers
from rayloom_engine.worker import start
from rayloom_operator.api.costs import Costs
from rayloom_operator.resolve import load, question, rank_memory, stage_split
from rt_facts import WELL_KNOWN, shape_of
from rt_shapes import LLAMA3_8B, make_costs
from rt_tiny import VARIANTS, tiny_variant

NAMES = WELL_KNOWN


def costs_of(shape):
    """The engine's costs, as the operator reads them."""
    return Costs.model_validate_json(model_costs(shape, shard_counts(shape)).model_dump_json(exclude_none=True))


def ranks(costs, tensor, pipeline, element_bytes=2):
    """The ranks that the operator computes. Equal ranks appear once."""
    split = stage_split.stages(costs.num_layers, pipeline, costs.head_layers)
    return rank_memory.Cut(costs, tensor, element_bytes).ranks(split)


def different_shards(shape, tensor):
    """The indexes of shards that may differ in size.

    If `tensor` divides all sizes, the first shard may be larger, and all other shards are equal.
    """
    is_even = shape.vocab_size % tensor == shape.intermediate_size % tensor == 0
    return sorted({0, tensor - 1}) if is_even else range(tensor)


def largest_rank(shape, tensor, pipeline):
    """Bytes of the largest rank's weights and of the largest KV block, as the engine allocates them."""
    weights, blocks = [], []
    for stage in make_stages(shape.num_layers, pipeline, shape.head_layers):
        for index in different_shards(shape, tensor):
            shard = Shard(index, tensor)
            kernels = choose_kernels(Target(device=torch.device("meta"), compute_dtype=torch.bfloat16))
            model, _ = empty_model(shape, ModelPart(stage, shard), kernels)
            weights.append(model.weight_bytes)
            kv_heads = len(shard.kv_heads(shape.num_kv_heads))
            per_layer_and_head = shape.kv_bytes_per_token(2) // (shape.num_layers * shape.num_kv_heads)
            blocks.append(BLOCK_SIZE * per_layer_and_head * len(stage.layers) * kv_heads)
    return max(weights), max(blocks)


def assert_same(shape, tensor, pipeline):
    found = ranks(costs_of(shape), tensor, pipeline)
    weights, block = largest_rank(shape, tensor, pipeline)
    assert max(rank.kv_block for rank in found) == block
    # The shard with biases and the shard with most rows of an uneven vocabulary may be different shards.
    spare = 2 * 2 * shape.hidden_size if (shape.o_bias or shape.mlp_bias) and shape.vocab_size % tensor else 0
    # torch holds sinks in float32, which is 2 bytes more than counted for each query head.
    sinks = 2 * shape.num_layers * shape.num_heads if shape.traits.has_sinks else 0
    assert weights - sinks <= max(rank.weights for rank in found) <= weights + spare


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_published_models_are_what_the_engine_allocates(name):
    shape = shape_of(name)
    (rank,) = ranks(costs_of(shape), 1, 1)

    assert rank.weights == shape.weight_bytes(2)
    assert rank.kv_block == BLOCK_SIZE * shape.kv_bytes_per_token(2)
    for tensor in shard_counts(shape):
        assert_same(shape, tensor, 1)
        assert_same(shape, tensor, 2)
    assert_same(shape, 1, 3)
    assert_same(shape, 1, shape.num_layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_costs_of_checkpoints_of_every_architecture_are_what_the_engine_allocates(variant, tmp_path):
    shape = read_shape(tiny_variant(tmp_path, variant))
    (rank,) = ranks(costs_of(shape), 1, 1, element_bytes=4)

    assert rank.weights == shape.weight_bytes(4)
    for tensor in shard_counts(shape):
        assert_same(shape, tensor, 1)
        assert_same(shape, tensor, 2)


def test_stages_have_the_engines_layers():
    for num_layers in (1, 2, 5, 30, 80):
        for num_stages in range(1, num_layers + 1):
            for head in (0.0, 0.6, 4.0):
                theirs = tuple(map(len, split_layers(num_layers, num_stages, head)))
                assert stage_split.split_layers(num_layers, num_stages, head) == theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_what_the_engine_keeps_free_for_it(name):
    shape = shape_of(name)
    settings = {"element_bytes": 2, "num_tokens": 8192, "num_seqs": 64}

    for tensor in shard_counts(shape):
        theirs = step_bytes(shape, tensor, **settings)
        assert rank_memory.step_bytes(costs_of(shape), tensor, **settings) == theirs


def test_defaults_and_shares_are_the_engines():
    assert EngineConfig().max_num_seqs == question.MAX_NUM_SEQS
    assert question.GPU_STEP_TOKENS == start._GPU_STEP_TOKENS
    assert question.CPU_STEP_TOKENS == start._CPU_STEP_TOKENS
    assert rank_memory.BLOCK_SIZE == BLOCK_SIZE
    assert (load.GPU_SHARE, load.CPU_SHARE, load.CPU_CAP) == (
        kv_memory._GPU_SHARE,
        kv_memory._CPU_SHARE,
        kv_memory._CPU_CAP,
    )


@pytest.mark.parametrize("span", [None, 1, 17, 4096])
@pytest.mark.parametrize("num_step_tokens", [None, 512])
def test_a_sequence_takes_the_engines_number_of_blocks(span, num_step_tokens):
    settings = {"per_node": 1, "memory": None, "tensor": 1, "pipeline": 1, "max_model_len": None, "num_requests": 1}
    asked = question.Question(
        shape=LLAMA3_8B.shape,
        costs=make_costs(windows=(span,)),
        dtype="bfloat16",
        num_step_tokens=num_step_tokens,
        **settings,
    )
    engine = kv_memory.SequenceBlocks(
        block_size=BLOCK_SIZE, window=span, num_step_tokens=num_step_tokens or start._GPU_STEP_TOKENS
    )
    for num_tokens in (1, 16, 17, 512, 4096, 8192, 40_000, 131_072):
        assert asked.num_blocks_of(num_tokens) == engine.most(num_tokens)
