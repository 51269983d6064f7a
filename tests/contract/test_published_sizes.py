"""Bytes per rank in `rayloom-operator plan`, beside the tensors that transformers makes for published models.

tools/model_sizes/ has the tensors and sums their bytes. The slow tests make the tensors again.
"""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_sizes.expected import active_weights_of, stored_bytes, weights_of
from model_sizes.page import PAGE, differences, page, read_config
from model_sizes.planned import planned_bytes
from model_sizes.tensors import FILE, meta_tensors, read_tensors, tensors_text
from published_models import PUBLISHED, config_path
from rayloom_engine.models.quantised.amounts import ends_amount, layer_amount, layer_forms
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import make_stages
from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.api.shipped_facts import published_models
from rt_facts import shape_of

TENSORS = read_tensors()
FACTS = {name: model.facts for name, model in published_models().items() if model.facts is not None}
NATIVE = sorted(name for name, facts in FACTS.items() if facts.shape.model_backend is None)
MEASURED = sorted(set(FACTS) - set(NATIVE))
MOST = 0.02
read_shape = functools.cache(shape_of)


def forms_of(facts):
    """The possible values of `keeps_quantised`: False, and also True if the checkpoint has quantised weights."""
    return (False,) if facts.quantization is None else (False, True)


def test_sizes_and_schemes_are_those_that_people_deploy():
    large = {name: facts for name, facts in FACTS.items() if facts.num_parameters > 8e9}

    assert len(large) >= 30
    assert max(facts.num_parameters for facts in large.values()) == 671_026_404_352
    assert sum(facts.num_active_parameters is not None for facts in large.values()) >= 8
    schemes = {facts.quantization.partition("-g")[0] for facts in large.values() if facts.quantization is not None}
    assert schemes >= {"awq-int4", "gptq-int4", "gptq-int8", "compressed-int4", "compressed-w8a8", "compressed-fp8"}
    assert schemes >= {"fp8", "fp8-block", "mxfp4"}
    assert {name for name, facts in FACTS.items() if (facts.quantization or "").startswith("gguf")}


@pytest.mark.parametrize("name", FACTS)
def test_no_rank_differs_by_more_than_2_percent_from_the_sum_of_its_tensors(name):
    config = read_config(name)
    for keeps_quantised in forms_of(FACTS[name]):
        found = differences(FACTS[name], config, TENSORS[name], keeps_quantised=keeps_quantised)

        assert {cut: part for cut, part in found.items() if abs(part) > MOST} == {}


@pytest.mark.parametrize("name", FACTS)
def test_the_parameters_are_those_of_transformers_and_of_the_models_card(name):
    total = weights_of(TENSORS[name])

    assert FACTS[name].num_parameters == total
    assert total / 1e9 == pytest.approx(PUBLISHED[name].billions, rel=0.001)


@pytest.mark.parametrize("name", [name for name in FACTS if PUBLISHED[name].active is not None])
def test_a_token_uses_the_parameters_that_the_models_card_names(name):
    active = FACTS[name].num_active_parameters
    shape = FACTS[name].shape
    embedding = shape.vocab_size * shape.hidden_size

    assert active == active_weights_of(TENSORS[name], read_config(name))
    # Model cards round the number. Some leave out the embedding, and some leave out both the embedding and the head.
    assert 0.97 * (active - 2 * embedding) < PUBLISHED[name].active * 1e9 < 1.03 * active


def test_a_model_without_experts_uses_all_parameters():
    dense = {name for name in FACTS if PUBLISHED[name].active is None}

    assert {name for name in dense if FACTS[name].num_active_parameters is not None} == set()


@pytest.mark.parametrize("name", [name for name in FACTS if not (FACTS[name].quantization or "").startswith("gguf")])
def test_the_bytes_of_the_files_are_those_of_their_tensors(name):
    facts = FACTS[name]
    expected = stored_bytes(TENSORS[name], read_config(name), ELEMENT_BYTES[facts.shape.checkpoint_dtype])

    assert facts.checkpoint_bytes == pytest.approx(expected, rel=MOST)


@st.composite
def cuts(draw):
    """A published model, a number of ranks that can share its layers, a number of stages, and `keeps_quantised`."""
    name = draw(st.sampled_from(NATIVE))
    costs = FACTS[name].costs
    tensor = draw(st.sampled_from([number for number in costs.tensor if number <= 32]))
    return name, tensor, draw(st.integers(1, min(costs.num_layers, 24))), draw(st.sampled_from(forms_of(FACTS[name])))


def rank_amounts(shape, tensor, pipeline):
    """(stage, shard) -> (elements, packed bytes), of the matrices and vectors that the engine allocates."""
    forms = list(zip(shape.layer_windows, layer_forms(shape), strict=True))
    examples = {form: index for index, form in enumerate(forms)}
    found = {}
    for shard in (Shard(index, tensor) for index in range(tensor)):
        of_layers = {form: layer_amount(shape, index, shard) for form, index in examples.items()}
        for stage in make_stages(shape.num_layers, pipeline, shape.head_layers):
            parts = [of_layers[forms[layer]] for layer in stage.layers]
            if stage.is_first or stage.is_last:
                parts.append(ends_amount(shape, shard, is_first=stage.is_first, is_last=stage.is_last))
            found[stage.index, shard.index] = tuple(map(sum, zip(*parts, strict=True)))
    return found


def replicated(name, shape, tensor, pipeline):
    """Elements of additional copies on several ranks: norms, routers, key/value heads, a shared embedding."""
    total = 0
    for each in TENSORS[name]:
        number = 1 if each.first is None else each.last - each.first + 1
        copies = max(tensor // shape.num_kv_heads, 1)
        if "norm" in each.name or each.module in ("gate", "router"):
            total += (tensor - 1) * each.numel * number
        elif each.module in ("k_proj", "v_proj"):
            total += (copies - 1) * each.numel * number
        elif each.module == "qkv_proj":
            total += (copies - 1) * 2 * shape.kv_size * shape.hidden_size * number
        elif each.module == "embed_tokens" and shape.tie_word_embeddings and pipeline > 1:
            total += each.numel
    return total


@settings(deadline=None, print_blob=True, max_examples=40)
@given(cuts())
def test_ranks_have_all_weights_once_or_in_copies_and_none_has_more_than_the_plan_says(cut):
    name, tensor, pipeline, keeps_quantised = cut
    facts = FACTS[name]
    element_bytes = ELEMENT_BYTES[facts.shape.checkpoint_dtype]
    shape = read_shape(name, is_dense=not keeps_quantised)
    ranks = rank_amounts(shape, tensor, pipeline)
    planned = planned_bytes(facts, tensor, pipeline, keeps_quantised=keeps_quantised)
    heaviest = max(elements * element_bytes + packed for elements, packed in ranks.values())

    assert len(ranks) == tensor * pipeline
    assert heaviest <= planned <= heaviest * (1 + MOST)
    if not keeps_quantised:
        elements = sum(number for number, _ in ranks.values())
        assert elements == weights_of(TENSORS[name]) + replicated(name, shape, tensor, pipeline)


@settings(deadline=None, print_blob=True, max_examples=40)
@given(cuts())
def test_more_ranks_in_a_stage_never_make_a_rank_heavier(cut):
    name, tensor, pipeline, keeps_quantised = cut
    sizes = [number for number in FACTS[name].costs.tensor if number >= tensor]
    weights = [planned_bytes(FACTS[name], size, pipeline, keeps_quantised=keeps_quantised) for size in sizes]

    assert weights == sorted(set(weights), reverse=True)


def test_the_page_shows_these_figures():
    assert PAGE.read_text(encoding="utf-8") == page(published_models(), TENSORS), "run: make facts"


@pytest.mark.slow
def test_the_tensors_are_those_that_transformers_makes():
    made = {name: meta_tensors(read_config(name)) for name in FACTS}

    assert FILE.read_text(encoding="utf-8") == tensors_text(made), "run: make facts"


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_no_stage_of_transformers_modules_has_more_than_the_plan_says(name, tmp_path):
    import torch

    from rayloom_engine.models.on_transformers.measure import read_meta_model
    from rayloom_engine.models.on_transformers.stage_cut import cut_to_stage

    (tmp_path / "config.json").write_bytes(config_path(name).read_bytes())
    costs = FACTS[name].costs
    pipeline = 3
    held = []
    for stage in make_stages(costs.num_layers, pipeline, costs.head_layers):
        meta = read_meta_model(tmp_path, torch.bfloat16)
        meta.model.tie_weights()
        cut_to_stage(meta, stage)
        held.append(sum(weight.numel() * 2 for weight in meta.model.parameters()))

    assert max(held) <= planned_bytes(FACTS[name], 1, pipeline) * (1 + MOST)
    assert planned_bytes(FACTS[name], 1, pipeline) <= max(held) * (1 + MOST)
