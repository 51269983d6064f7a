"""Mixtures of experts: routing against a plain loop, ties, and the logits of torch and of the C library.

Other files test cuts, batches, shards and sizes with the expert variants of rt_tiny.py. The architectures in this file
differ from these variants only in norms and in the weights of a token's experts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rayloom_engine.layers.experts import group_by_expert, select_experts
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.shape import read_shape
from rt_library import ISAS, LibraryModel, library_cache, load_on_library
from rt_quantised import quantised_checkpoint
from rt_stages import StagesInARow, answers, ids_by_request, load_stages, make_engine, stage_config
from rt_tiny import (
    VOCAB_SIZE,
    TinySequence,
    advance,
    cpu_kernels,
    load_tiny,
    make_cache,
    tiny_checkpoint,
    tiny_variant,
    transformers_logits,
)

TOKEN_IDS = [(7 * position) % VOCAB_SIZE for position in range(40)]
CASES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {
        "head_dim": 16,
        "num_experts": 20,  # more experts than a register has lanes
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32},
}


def library_logits(model: LibraryModel) -> torch.Tensor:
    (logits,) = advance(model, library_cache(model, 3), [(TinySequence(TOKEN_IDS, range(3)), 40)])
    return logits


@settings(max_examples=60, deadline=None)
@given(
    logits=st.integers(1, 9).flatmap(
        lambda count: st.lists(
            st.lists(st.integers(-3, 3).map(float), min_size=count, max_size=count), min_size=1, max_size=6
        )
    ),
    data=st.data(),
)
def test_routes_and_groups_are_those_of_a_plain_loop(logits: list[list[float]], data: st.DataObject) -> None:
    """The logits are small whole numbers, so many of them are equal."""
    num_experts = len(logits[0])
    num_selected = data.draw(st.integers(1, num_experts))
    normalises = data.draw(st.booleans())
    routes = select_experts(torch.tensor(logits), num_selected, normalises=normalises)
    pairs = []
    for token, row in enumerate(logits):
        best = sorted(range(num_experts), key=lambda expert: (-row[expert], expert))[:num_selected]
        total = sum(math.exp(row[expert]) for expert in (best if normalises else range(num_experts)))
        assert routes.experts_TK[token].tolist() == best
        expected = [math.exp(row[expert]) / total for expert in best]
        assert routes.weights_TK[token].tolist() == pytest.approx(expected, rel=1e-5)
        pairs += [(expert, token) for expert in best]
    groups = group_by_expert(routes.experts_TK, num_experts)
    assert groups.tokens_P.tolist() == [token for _, token in sorted(pairs)]
    assert groups.counts == [sum(expert == each for expert, _ in pairs) for each in range(num_experts)]
    for token, row in enumerate(routes.experts_TK.tolist()):
        places = groups.places_TK[token].tolist()
        assert [sorted(pairs)[place] for place in places] == [(expert, token) for expert in row]


@pytest.mark.parametrize("architecture", CASES)
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture, **CASES[architecture])
    expected = transformers_logits(folder, TOKEN_IDS)
    model = load_tiny(folder)
    (ours,) = advance(model, make_cache(model.shape), [(TinySequence(TOKEN_IDS, range(10)), 40)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    for isa in ISAS:
        found = library_logits(load_on_library(folder, isa, torch.float32))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_of_equal_experts_a_token_takes_the_first(tmp_path: Path) -> None:
    """A router of zeros makes all experts equally likely.

    Then only the weights of the first two experts have an effect.
    """
    folder = tiny_variant(tmp_path, "mixtral")
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("block_sparse_moe.gate.weight"):
            weights[name].zero_()
    found = []
    for factor in (1.0, -3.0):
        for name in weights:
            if ".experts.2." in name or ".experts.3." in name:
                weights[name] *= factor
        save_file(weights, file, {"format": "pt"})
        plain = load_model(folder, read_shape(folder), cpu_kernels(), dtype=torch.float32).model
        found += [advance(plain, make_cache(plain.shape), [(TinySequence(TOKEN_IDS, range(10)), 40)])[0]]
        found += [library_logits(load_on_library(folder, isa, torch.float32)) for isa in ISAS]
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "damaged",
    ["gate.weight", "experts.4.up_proj.weight", "shared_expert_gate.weight", "shared_expert.down_proj.weight"],
)
def test_a_nan_in_router_or_experts_reaches_the_logits(damaged: str, isa: str, tmp_path: Path) -> None:
    """Every token uses all six experts, so that no token avoids the damaged expert."""
    folder = tiny_checkpoint(
        tmp_path, "Qwen2MoeForCausalLM", num_experts=6, num_experts_per_tok=6, moe_intermediate_size=48
    )
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.1.mlp.{damaged}"].view(-1)[5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert library_logits(load_on_library(folder, isa, torch.bfloat16)).isnan().all()


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize("name", ["int8", "gptq", "fp8"])
def test_quantised_experts_are_those_of_their_dense_weights(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}
    folder = tiny_checkpoint(tmp_path / "dense", "Qwen3MoeForCausalLM", moe_intermediate_size=128, **sizes)
    if name != "int8":
        folder = quantised_checkpoint(folder, name, tmp_path / "quantised").parent / "quantised"
    quantization = "int8" if name == "int8" else "auto"
    (dense, *kept) = (
        load_on_library(folder, isa, torch.float32, quantization=each)
        for isa, each in [(ISAS[0], "none"), *((isa, quantization) for isa in ISAS)]
    )
    expected = library_logits(dense)
    costs = model_costs(read_shape(folder), (1,))
    for model in kept:
        difference = (library_logits(model) - expected).square().mean().sqrt() / expected.std()
        assert 0.0 < difference < 0.1
        if name != "int8":
            parts = (costs.both, costs.kinds[0].weights, costs.kinds[0].weights)
            kept_parts = [(part.kept_elements, part.kept_bytes) for part in parts]
            assert model.weight_bytes == sum(4 * elements[0] + packed[0] for elements, packed in kept_parts)


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_stages_give_the_same_bits_as_one_rank(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "qwen2-moe")
    one, two = (
        answers(make_engine(StagesInARow(load_stages(stage_config(folder, stages)))), VOCAB_SIZE) for stages in (1, 2)
    )
    assert ids_by_request(one) == ids_by_request(two)
