"""The transformers backend: the tokens of tiny models equal transformers' greedy tokens. Also tests sizes and refusals.

Covers features that differ between architectures: windows, soft caps, learned positions, sinks and biases. It also
covers experts whose tensors are stacked during the load, and heads whose keys are wider than their values. `make archs`
compares all architectures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from rayloom_engine.models.shard_counts import check_shards
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.worker.start import find_model, load_rank, part_of
from rt_architecture_checks import CHECKS, PROMPTS, Compared, compare
from rt_architectures import (
    ARCHITECTURES,
    NUM_TOKENS,
    REFUSED,
    TinyArchitecture,
    architecture_checkpoint,
    config_alone,
    greedy_tokens,
)
from rt_lazy import LazyModule
from rt_one_rank import OneRank
from rt_stages import load_stages, stage_config
from rt_two_ranks import TwoRanks

# These modules import most of transformers.
measure = LazyModule("rayloom_engine.models.on_transformers.measure")
shard_plan = LazyModule("rayloom_engine.models.on_transformers.shard_plan")

ONE_RANK = {
    **dict.fromkeys(("cohere2", "gpt2", "dots1", "deepseek_v3", "gpt_oss", "phi"), "transformers"),
    "mixtral": "native",
}
# With `auto`, the native decoder computes these. transformers' modules are tested because of their attention sinks.
FORCED = {"gpt_oss": "transformers"}

# Architectures whose ranks exchange different tensors. cohere2: attention and MLP run in parallel. phi: one rank adds
# the biases. dots1: experts. deepseek_v3: experts, and an attention that every rank computes completely. glm: a fused
# matrix whose outputs are joined. vaultgemma: soft caps. The values are the layout and the rank that is killed.
TWO_RANKS = {
    "cohere2": ("tensor", 1),
    "phi": ("tensor", 0),
    "dots1": ("tensor", 1),
    "deepseek_v3": ("pipeline", 0),
    "glm": ("pipeline", 1),
    "vaultgemma": ("pipeline", 0),
}
# Number of tokens after a prompt that is computed alone. In a batch each prompt gets NUM_TOKENS tokens, whose steps
# need the same code.
_NUM_ALONE = 6
FEW = 2  # index in PROMPTS; from this prompt on, prompts with their answers need more blocks than the ranks have


class _Models:
    """Checkpoints of tiny models, and the tokens that transformers and one rank generate. Created at the first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compared: dict[str, Compared] = {}
        self._expected: dict[str, list[list[int]]] = {}

    def compared(self, name: str) -> Compared:
        if name not in self._compared:
            backend = FORCED.get(name, "auto")
            self._compared[name] = compare(self._folder / name, ARCHITECTURES[name], _NUM_ALONE, backend)
        return self._compared[name]

    def folder(self, name: str) -> Path:
        folder = self._folder / name
        return folder if folder.exists() else architecture_checkpoint(folder, ARCHITECTURES[name])

    def expected(self, name: str) -> list[list[int]]:
        if name in ONE_RANK:
            return self.compared(name).expected
        if name not in self._expected:
            self._expected[name] = greedy_tokens(self.folder(name), PROMPTS)
        return self._expected[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> _Models:
    return _Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cohere2(models: _Models) -> Path:
    return models.folder("cohere2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ONE_RANK)
def test_tokens_are_those_of_transformers_however_the_work_is_cut_and_repeated(name: str, models: _Models) -> None:
    compared = models.compared(name)
    assert compared.backend == ONE_RANK[name]
    assert len({tuple(tokens) for tokens in compared.expected}) == len(compared.expected)
    assert compared.passed == dict.fromkeys(CHECKS, True), compared


# Stages run in separate processes only in cases where the test kills a stage. The test above has stages in one process.
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "tensor") for name in TWO_RANKS]
    + [(name, layout) for name, (layout, _) in TWO_RANKS.items() if layout == "pipeline"],
)
def test_two_ranks_give_the_same_tokens_also_when_one_is_killed(
    name: str, layout: str, models: _Models, ranks: TwoRanks
) -> None:
    folder, expected = models.folder(name), models.expected(name)[FEW:]
    struck_layout, victim = TWO_RANKS[name]
    killed = victim if layout == struck_layout else None
    num_losses = ranks.num_losses
    assert ranks.greedy(folder, PROMPTS[FEW:], NUM_TOKENS, killed=killed, **{layout: 2}) == expected
    assert ranks.num_losses == num_losses + (killed is not None)


def test_two_stages_of_two_shards_give_the_same_tokens(models: _Models, ranks: TwoRanks) -> None:
    tokens = ranks.greedy(models.folder("cohere2"), PROMPTS[FEW:], NUM_TOKENS, tensor=2, pipeline=2)
    assert tokens == models.expected("cohere2")[FEW:]


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
    assert (costs.tensor, costs.layers) == ((1, 2), "abab")
    of_one, of_two = (
        sum(costs.kinds["ab".index(letter)].weights.elements[index] for letter in costs.layers)
        + costs.both.elements[index]
        for index in (0, 1)
    )
    assert of_one == found.num_parameters
    # Both ranks have a whole norm of 64 in each layer, and another one after the layers.
    assert of_two == (of_one + 5 * 64) // 2
    assert {kind.kv.elements for kind in costs.kinds} == {(2 * 2 * 16, 2 * 16)}


def test_experts_that_a_token_does_not_select_are_not_counted_as_used() -> None:
    found = write_facts.outcome_of("deepseek-v2-lite")["facts"]
    shape = found["shape"]
    assert (shape["num_experts"], shape["num_experts_per_token"], shape["moe_intermediate_size"]) == (64, 6, 1408)
    # 58 of 64 experts in 26 of 27 layers, each with three matrices of 2048 x 1408.
    assert found["num_active_parameters"] == found["num_parameters"] - 58 * 26 * 3 * 2048 * 1408
    of_layers = found["num_active_parameters"] - found["costs"]["both"]["elements"][0]
    assert found["costs"]["head_layers"] == pytest.approx(0.5 * shape["vocab_size"] * 2048 / (of_layers / 27), rel=1e-6)
    published = json.loads(write_facts.PUBLISHED_FACTS.read_text(encoding="utf-8"))
    assert found == published["deepseek-v2-lite"]["facts"], "run: make facts"


def test_the_memory_of_a_token_counts_all_of_its_experts_also_on_a_shard(tmp_path: Path) -> None:
    wide = {**ARCHITECTURES["dots1"].settings, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
    shape = read_model_shape(config_alone(tmp_path, TinyArchitecture("dots1", wide)), "transformers")
    assert isinstance(shape, MeasuredShape)
    assert [shape.share(count).widest for count in (1, 2)] == [4 * 96, 4 * 48]


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


def test_a_decoder_that_counts_positions_from_its_own_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": false}')
    with pytest.raises(ModelError, match="BartForCausalLM takes no position_ids"):
        read_model_shape(tmp_path)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "my_own", "auto_map": {"AutoConfig": "config.Mine", "AutoModelForCausalLM": "model.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ModelError, match=r"model type my_own needs code from its repository \(auto_map\)"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("given", "num_ranks", "sentence"),
    [
        (
            "cohere2",  # has 2 key/value heads
            4,
            "4 ranks cannot share a layer of Cohere2ForCausalLM in equal parts with model_backend transformers; "
            "use 1 or 2, and for more ranks pipeline_parallel_size",
        ),
        (
            "phi3",  # its matrices are fused, and it has 4 query heads
            3,
            "3 ranks cannot share a layer of Phi3ForCausalLM in equal parts with model_backend transformers; use "
            "1, 2 or 4, and for more ranks pipeline_parallel_size",
        ),
        (
            TinyArchitecture("gemma", {"num_key_value_heads": 1}),
            2,
            "2 ranks cannot share a layer of GemmaForCausalLM: the model's layers have 1 key/value head, which "
            "transformers' modules cannot share; use 1, and for more ranks pipeline_parallel_size",
        ),
        (
            "gpt2",
            2,
            "2 ranks cannot share a layer of GPT2LMHeadModel: transformers has no tensor parallel plan for the model; "
            "use 1, and for more ranks pipeline_parallel_size",
        ),
        (
            "gpt_oss",
            2,
            "2 ranks cannot share a layer of GptOssForCausalLM: transformers' tensor parallel plan for the model cuts "
            "no layer; use 1, and for more ranks pipeline_parallel_size",
        ),
    ],
)
def test_ranks_that_cannot_share_a_layer_are_refused_with_numbers_that_can(
    given: str | TinyArchitecture, num_ranks: int, sentence: str, tmp_path: Path
) -> None:
    folder = config_alone(tmp_path, ARCHITECTURES[given] if isinstance(given, str) else given)
    shape = read_model_shape(folder, "transformers")
    with pytest.raises(ConfigError) as refused:
        check_shards(shape, num_ranks)
    assert str(refused.value) == f"tensor_parallel_size: {sentence}"


@pytest.mark.parametrize(
    ("name", "rule", "style", "reason"),
    [
        (
            "phi",
            "model.layers.*.input_layernorm",
            "sequence_parallel",
            "has the style sequence_parallel at model.layers.0.input_layernorm, which the engine does not have",
        ),
        ("dots1", "model.layers.*.mlp.experts.down_proj", "", "does not cut model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_plan_that_ranks_cannot_follow_is_refused(
    name: str, rule: str, style: str, reason: str, tmp_path: Path
) -> None:
    meta = measure.read_meta_model(config_alone(tmp_path, ARCHITECTURES[name]), torch.float32)
    meta.model._tp_plan = {**meta.model._tp_plan, rule: style}
    with pytest.raises(ModelError) as refused:
        shard_plan.read_shard_plan(meta)
    assert str(refused.value) == f"transformers' tensor parallel plan for the model {reason}"


def test_matrices_that_are_joined_in_one_are_cut_one_by_one() -> None:
    gate_and_up = shard_plan.Cut(-2, num_packed=2)
    assert gate_and_up.ranges(12, Shard(1, 2)) == (range(3, 6), range(9, 12))
    assert [gate_and_up.divides(12, count) for count in (2, 3, 4)] == [True, True, False]


def test_adapters_are_refused_with_the_settings_to_remove(cohere2: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        find_model(EngineConfig(model=str(cohere2), allow_runtime_lora_updating=True), no_progress)
    assert str(refused.value) == (
        "adapters: LoRA adapters need the native backend, and transformers' modules compute Cohere2ForCausalLM; "
        "remove adapters, managed_adapters and allow_runtime_lora_updating (in an LLMService: spec.model.adapters)"
    )


def test_stages_hold_their_own_weights_alone(cohere2: Path) -> None:
    shape = read_model_shape(cohere2)
    assert isinstance(shape, MeasuredShape)
    first, last = load_stages(stage_config(cohere2, 2))
    layers = [sum(shape.layer_parameters[index] for index in rank.stage.layers) for rank in (first, last)]
    assert first.weight_bytes == 4 * (layers[0] + shape.embedding_parameters)
    assert last.weight_bytes == 4 * (layers[1] + shape.final_parameters)
    assert [len(rank.loaded.kv_layout.sizes) for rank in (first, last)] == [2, 2]


def test_a_shard_reads_and_holds_its_part_of_each_matrix_and_one_adds_the_biases(models: _Models) -> None:
    # The model has a vocabulary of 256, a width of 64, 4 query heads and 2 key/value heads of 16, a feed-forward of 96,
    # and 4 layers.
    layer = (32 * 64 + 32) + 2 * (16 * 64 + 16) + 64 * 32 + (48 * 64 + 48) + 64 * 48 + 2 * 64
    ends = 128 * 64 + (128 * 64 + 128) + 2 * 64
    summed_biases = 2 * 64
    whole = stage_config(models.folder("phi"), tensor_parallel_size=2)
    resolved, shape = find_model(whole, no_progress)
    shards = [load_rank(whole, resolved, shape, no_progress, part=part_of(whole, shape, index)) for index in (0, 1)]
    elements = [4 * (layer + summed_biases) + ends, 4 * layer + ends]
    assert [rank.weight_bytes for rank in shards] == [4 * number for number in elements]
    assert [rank.num_bytes_read for rank in shards] == [rank.weight_bytes for rank in shards]
    assert [rank.loaded.kv_layout.sizes for rank in shards] == [((1, 16),) * 4] * 2
    assert isinstance(shape, MeasuredShape)
    share = shape.share(2)
    assert (share.layer_parameters, share.both_parameters) == ((layer + summed_biases,) * 4, ends)


def test_a_shard_reads_its_part_of_each_expert(models: _Models) -> None:
    config = stage_config(models.folder("dots1"), tensor_parallel_size=2)
    resolved, shape = find_model(config, no_progress)
    rank = load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, 1))
    choice_biases = 3 * 4 * 4  # float32, of 4 experts in 3 layers; these are not weights of products
    assert rank.num_bytes_read == rank.weight_bytes + choice_biases


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
