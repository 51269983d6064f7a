"""Models of the transformers backend: six architectures against transformers' own greedy tokens, sizes, refusals.

Covers what sets architectures apart: windows and soft caps, learned positions, experts whose tensors are stacked during
the load, heads whose keys are wider than their values, sinks, biases. `make archs` compares all architectures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import write_facts
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.inspection import facts, inspect_model
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.reading import read_model_shape
from rayloom_engine.worker.start import find_model
from rt_architecture_checks import CHECKS, compare
from rt_architectures import ARCHITECTURES, REFUSED, architecture_checkpoint
from rt_one_rank import OneRank
from rt_stages import load_stages, stage_config

SIX = ("cohere2", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "phi")


@pytest.fixture(scope="module")
def cohere2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architecture_checkpoint(tmp_path_factory.mktemp("cohere2"), ARCHITECTURES["cohere2"])


@pytest.mark.parametrize("name", SIX)
def test_tokens_are_those_of_transformers_however_the_work_is_cut_and_repeated(name: str, tmp_path: Path) -> None:
    compared = compare(tmp_path, ARCHITECTURES[name])
    assert compared.backend == "transformers"
    assert len({tuple(tokens) for tokens in compared.expected}) == len(compared.expected)
    assert compared.passed == dict.fromkeys(CHECKS, True), compared


def test_sizes_are_those_of_the_tensors_and_of_the_cache_in_memory(cohere2: Path) -> None:
    rank = OneRank(cohere2)
    shape = rank.shape
    assert isinstance(shape, MeasuredShape)
    assert rank.loaded.weight_bytes == 4 * shape.num_parameters
    cache_bytes = rank.loaded.kv_layout.block_bytes(16, 4)
    assert cache_bytes == 16 * shape.kv_bytes_per_token(4) == 16 * 2 * 4 * 2 * 16 * 4  # 4 layers, 2 heads of 16
    assert shape.layer_windows == (8, None, 8, None)


def test_an_inspection_names_the_backend_and_its_costs_sum_to_the_weights(cohere2: Path) -> None:
    found = facts(*inspect_model(str(cohere2), None))
    assert found.shape is not None and found.costs is not None and found.num_parameters is not None
    assert (found.shape.architecture, found.shape.model_backend) == ("Cohere2ForCausalLM", "transformers")
    costs = found.costs
    assert (costs.tensor, costs.layers) == ((1,), "abab")
    layers = sum(costs.kinds["ab".index(letter)].weights.elements[0] for letter in costs.layers)
    assert layers + costs.both.elements[0] == found.num_parameters


def test_experts_that_a_token_does_not_select_are_not_counted_as_used() -> None:
    found = write_facts.outcome_of("deepseek-v2-lite")["facts"]
    shape = found["shape"]
    assert (shape["num_experts"], shape["num_experts_per_token"], shape["moe_intermediate_size"]) == (64, 6, 1408)
    # 58 of 64 experts in 26 of 27 layers, each with three matrices of 2048 x 1408.
    assert found["num_active_parameters"] == found["num_parameters"] - 58 * 26 * 3 * 2048 * 1408
    published = json.loads(write_facts.PUBLISHED_FACTS.read_text(encoding="utf-8"))
    assert found == published["deepseek-v2-lite"]["facts"], "run: make facts"


def test_an_inspection_says_that_layers_cannot_be_shared_by_stages(tmp_path: Path, cohere2: Path) -> None:
    found = facts(*inspect_model(str(architecture_checkpoint(tmp_path, ARCHITECTURES["gemma4_text"])), None))
    divisible = facts(*inspect_model(str(cohere2), None))
    assert found.costs is not None and divisible.costs is not None
    assert (found.costs.most_stages, divisible.costs.most_stages) == (1, None)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gemma-3-27b", "; a checkpoint of its text model alone (Gemma3ForCausalLM) can be served; works: "),
        ("llama-4-scout", ", such as vision; works: "),
    ],
)
def test_a_model_for_images_is_refused_with_the_text_model_that_works(name: str, advice: str) -> None:
    refusal = write_facts.outcome_of(name)["refusal"]
    assert "has parts beside a text model, such as vision" in refusal
    assert advice in refusal


def test_a_process_without_weights_measures_the_same_in_a_child(cohere2: Path) -> None:
    assert read_model_shape(cohere2, in_child=True) == read_model_shape(cohere2)


def test_auto_takes_the_own_decoder_where_there_is_one(tmp_path: Path) -> None:
    folder = architecture_checkpoint(tmp_path, ARCHITECTURES["llama"])
    assert not isinstance(read_model_shape(folder), MeasuredShape)
    native = read_model_shape(folder, "native")
    measured = read_model_shape(folder, "transformers")
    assert isinstance(measured, MeasuredShape)
    assert measured.num_parameters == native.num_parameters
    assert measured.kv_bytes_per_token(2) == native.kv_bytes_per_token(2)


def test_the_native_backend_refuses_other_architectures_and_names_its_own(cohere2: Path) -> None:
    sentence = (
        "architecture Cohere2ForCausalLM is not supported; works: LlamaForCausalLM, .*; with model_backend auto or "
        "transformers, most other decoder-only models work$"
    )
    with pytest.raises(ModelError, match=sentence):
        read_model_shape(cohere2, "native")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "t5 is an encoder-decoder model"),
        ("mamba", "MambaForCausalLM has state-space, linear-attention or recurrent layers"),
        ("lfm2", "lfm2 has layers of the kind conv"),
        ("bloom", "BloomForCausalLM does not compute its attention through transformers' attention interface"),
        ("bert", "BertLMHeadModel cannot be served, because its attention is bidirectional"),
        ("vit", "vit has no causal language model in transformers"),
        (
            "llava",
            "llava has parts beside a text model, such as vision; a checkpoint of its text model alone "
            "(LlamaForCausalLM) can be served",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name_before_weights_are_read(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **REFUSED.get(name, {})}))
    with pytest.raises(ModelError) as refused:
        read_model_shape(tmp_path)
    assert refused.value.fault == "Unsupported"
    assert f"config.json: {reason}; works: decoder-only language models" in str(refused.value)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "my_own", "auto_map": {"AutoConfig": "config.Mine", "AutoModelForCausalLM": "model.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ModelError, match=r"model type my_own needs code from its repository \(auto_map\)"):
        read_model_shape(tmp_path)


def test_tensor_parallelism_is_refused_with_the_setting_to_change(cohere2: Path) -> None:
    config = EngineConfig(model=str(cohere2), tensor_parallel_size=2)
    with pytest.raises(ConfigError) as refused:
        find_model(config, no_progress)
    assert str(refused.value) == (
        "tensor_parallel_size: 2 ranks cannot share a layer of Cohere2ForCausalLM, which transformers' modules "
        "compute; use 1, and for more ranks pipeline_parallel_size"
    )


def test_adapters_are_refused_with_the_settings_to_remove(cohere2: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        find_model(EngineConfig(model=str(cohere2), allow_runtime_lora_updating=True), no_progress)
    assert str(refused.value) == (
        "adapters: LoRA adapters need the native backend, and transformers' modules compute Cohere2ForCausalLM; "
        "remove adapters and allow_runtime_lora_updating"
    )


def test_stages_hold_their_own_weights_alone(cohere2: Path) -> None:
    shape = read_model_shape(cohere2)
    assert isinstance(shape, MeasuredShape)
    first, last = load_stages(stage_config(cohere2, 2))
    layers = [sum(shape.layer_parameters[index] for index in rank.stage.layers) for rank in (first, last)]
    assert first.weight_bytes == 4 * (layers[0] + shape.embedding_parameters)
    assert last.weight_bytes == 4 * (layers[1] + shape.final_parameters)
    assert [len(rank.loaded.kv_layout.sizes) for rank in (first, last)] == [2, 2]


def test_weights_that_do_not_fit_are_refused_with_their_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = architecture_checkpoint(tmp_path, ARCHITECTURES["phi"])
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.fc1.weight"]
    weights["model.layers.2.mlp.fc2.weight"] = torch.zeros(3, 4)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        OneRank(folder)
    assert "missing: model.layers.1.mlp.fc1.weight; wrong: model.layers.2.mlp.fc2.weight" in str(refused.value)
