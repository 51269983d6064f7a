"""The operator counts as many bytes for LoRA adapters as the engine keeps free for them."""

import pytest

from published_models import PUBLISHED
from rayloom_engine.config import EngineConfig
from rayloom_engine.models.adapters.memory import adapter_bytes, adapter_token_bytes
from rayloom_engine.models.adapters.peft_config import MOST_RANK
from rayloom_engine.models.adapters.support import can_have_adapters
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.inspection import inspect_model
from rayloom_engine.models.shard_counts import shard_counts
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import make_stages
from rayloom_operator.api.costs import Costs
from rayloom_operator.api.engine_args import EngineArgs
from rayloom_operator.api.shipped_facts import builtin_models, published_models
from rayloom_operator.resolve import question, rank_memory, stage_split
from rt_facts import WELL_KNOWN, shape_of

BUILTIN = "builtin://smollm2-135m"


def costs_of(shape):
    """The engine's costs, as the operator reads them."""
    return Costs.model_validate_json(model_costs(shape, shard_counts(shape)).model_dump_json(exclude_none=True))


def shape_named(name):
    return inspect_model(name, None)[1] if name == BUILTIN else shape_of(name)


def of_operator(costs, tensor, pipeline, *, count, lora_rank, keeps_quantised=False):
    """The bytes for adapters on the rank with most of them, with a step of 512 tokens."""
    room = rank_memory.AdapterRoom(
        costs=costs.adapters, num_adapters=count, lora_rank=lora_rank, num_step_tokens=question.CPU_STEP_TOKENS
    )
    split = stage_split.stages(costs.num_layers, pipeline, costs.head_layers)
    cut = rank_memory.Cut(costs, tensor, 2, keeps_quantised=keeps_quantised, adapters=room)
    return max(rank.adapters for rank in cut.ranks(split))


def of_engine(shape, tensor, pipeline, *, count, lora_rank, cut_unit=1):
    parts = [
        ModelPart(stage, Shard(index, tensor))
        for stage in make_stages(shape.num_layers, pipeline, shape.head_layers)
        for index in range(tensor)
    ]
    sizes = [adapter_bytes(shape, part, lora_rank, element_bytes=2, cut_unit=cut_unit) for part in parts]
    return count * max(sizes) + question.CPU_STEP_TOKENS * adapter_token_bytes(shape, tensor)


@pytest.mark.parametrize("name", [BUILTIN, *WELL_KNOWN])
@pytest.mark.parametrize(("count", "lora_rank"), [(1, 1), (4, 16), (64, 200)])
def test_adapters_take_what_the_engine_keeps_free_for_them(name, count, lora_rank):
    shape = shape_named(name)
    costs = costs_of(shape)
    adapters = {"count": count, "lora_rank": lora_rank}

    for tensor in costs.tensor:
        for pipeline in (1, 2, 3):
            theirs = of_engine(shape, tensor, pipeline, **adapters)
            assert of_operator(costs, tensor, pipeline, **adapters) == theirs, (tensor, pipeline)


@pytest.mark.parametrize("name", [BUILTIN])
def test_adapters_of_a_rank_with_quantised_weights_are_cut_as_the_weights_are(name):
    shape = shape_named(name)
    adapters = {"count": 4, "lora_rank": 16}

    assert shape.scheme is not None
    for tensor in (1, 3, 9):
        theirs = of_engine(shape, tensor, 1, cut_unit=shape.scheme.cut_unit, **adapters)
        assert of_operator(costs_of(shape), tensor, 1, keeps_quantised=True, **adapters) == theirs


def test_four_adapters_of_rank_16_beside_smollm2():
    costs = builtin_models()[BUILTIN].costs

    # The adapters need 4 x 5 pages of 2 MiB, and a step needs 512 x (3072 + 8 x 1536) bytes. One of three ranks needs 4
    # x 3 pages, and 512 x (3072 + 8 x 512) bytes. See tests/engine_unit/test_adapter_memory.py.
    assert of_operator(costs, 1, 1, count=4, lora_rank=16) == 41_943_040 + 7_864_320
    assert of_operator(costs, 3, 1, count=4, lora_rank=16) == 25_165_824 + 3_670_016


def test_defaults_and_limits_are_the_engines():
    assert EngineConfig().max_loras == question.MAX_LORAS
    assert EngineConfig().max_lora_rank == question.MAX_LORA_RANK
    assert EngineArgs(maxLoraRank=MOST_RANK).max_lora_rank == MOST_RANK
    with pytest.raises(ValueError, match="less than or equal to 256"):
        EngineArgs(maxLoraRank=MOST_RANK + 1)


def test_models_that_no_adapter_can_update_have_no_costs_of_adapters():
    for name, model in published_models().items():
        if model.facts is not None and model.facts.shape.model_backend is None:
            assert (model.facts.costs.adapters is not None) == can_have_adapters(shape_of(name)), name
    assert set(PUBLISHED) == set(published_models())
