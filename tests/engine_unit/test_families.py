"""The table of families: fields of config.json in the dialects of transformers 4 and 5, and refused values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.layers.linear_spec import AxisPart, slices_of
from rayloom_engine.models.adapters.support import check_adapters
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.decoder_spec import checkpoint_sizes, decoder_spec
from rayloom_engine.models.families import FAMILIES
from rayloom_engine.models.quantised.amounts import layer_amount
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import whole_model
from rt_rope import YARN, config_folder


def shape_of(folder: Path, architecture: str, **changes: Any) -> ModelShape:
    return read_shape(config_folder(folder, architectures=[architecture], **changes))


def test_gemma3_of_transformers_4_has_two_rotary_embeddings_and_a_pattern_of_windows(tmp_path: Path) -> None:
    shape = shape_of(
        tmp_path,
        "Gemma3ForCausalLM",
        num_hidden_layers=8,
        sliding_window=512,
        sliding_window_pattern=3,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=64,
    )
    assert shape.layer_windows == (512, 512, None, 512, 512, None, 512, 512)
    full, windowed = shape.rope_of(None), shape.rope_of(512)
    assert (full.theta, full.kind, full.factor) == (1_000_000.0, "linear", 8.0)
    assert (windowed.theta, windowed.kind) == (10_000.0, "default")
    assert shape.score_scale == 0.125
    assert (shape.traits.score_cap, shape.traits.logit_cap) == (None, None)
    assert shape.tie_word_embeddings and shape.qk_norm
    assert shape.traits.embedding_scale**2 == pytest.approx(shape.hidden_size)


def test_gemma3_of_transformers_5_has_an_object_for_each_type_of_layers(tmp_path: Path) -> None:
    ropes = {"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}
    shape = shape_of(tmp_path, "Gemma3ForCausalLM", num_hidden_layers=6, rope_parameters=ropes)
    assert shape.layer_windows == (*(4096,) * 5, None)
    assert (shape.rope.theta, shape.rope.kind) == (5e5, "yarn")
    assert shape.rope_of(4096).theta == 10_000.0
    # The object of layers with windows may leave its theta out. The theta beside the objects is not theirs.
    shape = shape_of(tmp_path, "Gemma3ForCausalLM", num_hidden_layers=6, rope_parameters=ropes, rope_theta=1e6)
    assert shape.rope_of(4096).theta == 10_000.0


def test_gemma2_caps_scores_and_logits_unless_config_json_has_null(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "Gemma2ForCausalLM", num_hidden_layers=3)
    assert (shape.traits.score_cap, shape.traits.logit_cap) == (50.0, 30.0)
    assert shape.layer_windows == (4096, None, 4096)
    shape = shape_of(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (shape.traits.score_cap, shape.traits.logit_cap) == (None, None)


def test_granite_has_factors_and_divides_its_logits(tmp_path: Path) -> None:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.015625}
    shape = shape_of(tmp_path, "GraniteForCausalLM", logits_scaling=8.0, **factors)
    traits = shape.traits
    assert (traits.embedding_scale, traits.residual_scale, shape.score_scale) == (12.0, 0.25, 0.015625)
    assert (traits.logit_scale, traits.has_updates) == (0.125, True)


def test_experts_of_qwen_are_in_the_layers_that_config_json_names(tmp_path: Path) -> None:
    """6 layers: every second one has experts, but not layer 3."""
    layers = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sizes = {"hidden_size": 8, "intermediate_size": 20, "moe_intermediate_size": 6, "num_experts": 4}
    shape = shape_of(
        tmp_path, "Qwen2MoeForCausalLM", **layers, **sizes, num_experts_per_tok=2, shared_expert_intermediate_size=10
    )
    assert [shape.experts_of(layer) is not None for layer in range(6)] == [False, True, False, False, False, True]
    assert shape.named_feed_forward_sizes == {
        "intermediate_size": 20,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10,
    }
    experts = shape.experts
    assert experts is not None and not experts.normalises_weights
    # Router and shared gate have 5 rows together. Each of four experts has 3 x 6 rows, and the shared expert has 3 x
    # 10.
    assert experts.layer_parameters(8) == 8 * (5 + 4 * 18 + 30)
    # In each of two layers, a token does not use two of the experts.
    assert shape.num_parameters - shape.num_active_parameters == 2 * 2 * 8 * 18
    costs = model_costs(shape, (1, 2))
    assert (costs.layers, len(costs.kinds)) == ("ab3ab", 2)


def test_gpt_oss_has_biases_and_a_window_in_every_second_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_local_experts": 4, "num_experts_per_tok": 1}
    shape = shape_of(tmp_path, "GptOssForCausalLM", num_hidden_layers=3, **sizes)
    assert shape.layer_windows == (128, None, 128)
    assert (shape.qkv_bias, shape.o_bias, shape.head_dim) == (True, True, 64)
    assert shape.checkpoint_dtype == "bfloat16"
    assert (shape.rope.kind, shape.rope.factor, shape.rope.theta) == ("yarn", 32.0, 150_000.0)
    assert (shape.rope.original_max_position, shape.rope.is_truncated) == (4096, False)
    assert (shape.traits.activation, shape.traits.gate_slope, shape.traits.gate_limit) == ("clamped_silu", 1.702, 7.0)
    experts = shape.experts
    assert experts is not None and experts.normalises_weights
    # A row of 8 weights and a bias for each expert in the router; 3 x 6 rows of 8 weights, and 2 x 6 + 8 biases.
    of_expert = 18 * 8 + 20
    assert experts.layer_parameters(8) == 4 * 9 + 4 * of_expert
    assert shape.num_parameters - shape.num_active_parameters == 3 * 3 * of_expert
    plain = shape_of(tmp_path, "GptOssForCausalLM", attention_bias=False, swiglu_limit=3, swiglu_alpha=2)
    assert (plain.qkv_bias, plain.traits.gate_slope, plain.traits.gate_limit) == (False, 2.0, 3.0)
    given = shape_of(tmp_path, "GptOssForCausalLM", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (given.rope.kind, given.rope.theta) == ("linear", 150_000.0)


def test_the_number_of_experts_has_the_name_of_either_dialect(tmp_path: Path) -> None:
    """Published files of Qwen3-MoE have num_experts; files that transformers 5 writes have num_local_experts."""
    for field in ("num_experts", "num_local_experts"):
        shape = shape_of(tmp_path, "Qwen3MoeForCausalLM", **{field: 16}, norm_topk_prob=True)
        assert shape.experts is not None
        assert (shape.experts.num_experts, shape.experts.normalises_weights) == (16, True)
    mixtral = shape_of(tmp_path, "MixtralForCausalLM", intermediate_size=24, num_local_experts=2)
    assert mixtral.named_feed_forward_sizes == {"intermediate_size": 24}
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    assert checkpoint_sizes(mixtral)[name] == (mixtral.hidden_size, 24)


@pytest.mark.parametrize(
    ("architecture", "sizes", "published"),
    [
        # (hidden size, layers, heads, key/value heads, vocabulary, experts, experts of a token), (total, active
        # parameters)
        ("MixtralForCausalLM", (4096, 32, 32, 8, 32000, 8, 2), (46_702_792_704, 12_879_925_248)),
        ("Qwen3MoeForCausalLM", (2048, 48, 32, 4, 151936, 128, 8), (30_532_122_624, 3_353_032_704)),
        ("OlmoeForCausalLM", (2048, 16, 16, 16, 50304, 64, 8), (6_919_161_856, 1_282_017_280)),
    ],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "OLMoE-1B-7B"],
)
def test_published_models_have_their_total_and_active_parameters(
    architecture: str, sizes: tuple[int, ...], published: tuple[int, int], tmp_path: Path
) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    feed_forward = {"intermediate_size": {4096: 14336, 2048: 1024}[sizes[0]], "moe_intermediate_size": 768}
    fields = dict(zip((*names, "num_experts", "num_experts_per_tok"), sizes, strict=True))
    shape = shape_of(tmp_path, architecture, head_dim=128, **fields, **feed_forward)
    assert (shape.num_parameters, shape.num_active_parameters) == published


def test_norms_are_where_the_family_has_them(tmp_path: Path) -> None:
    norms = {}
    for architecture in ("LlamaForCausalLM", "Olmo2ForCausalLM", "Gemma2ForCausalLM"):
        names = checkpoint_sizes(shape_of(tmp_path, architecture))
        layer = "model.layers.0."
        norms[architecture] = [
            name.removeprefix(layer).removesuffix(".weight") for name in names if "layernorm" in name
        ]
    after = ["post_attention_layernorm", "post_feedforward_layernorm"]
    assert norms == {
        "LlamaForCausalLM": ["input_layernorm", "post_attention_layernorm"],
        "Olmo2ForCausalLM": after,
        "Gemma2ForCausalLM": ["input_layernorm", after[0], "pre_feedforward_layernorm", after[1]],
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parameters_and_costs_are_those_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    shape = shape_of(tmp_path, architecture, num_hidden_layers=2, num_key_value_heads=1, **biases)
    elements = [math.prod(sizes) for sizes in checkpoint_sizes(shape).values()]
    assert shape.num_parameters == sum(elements)
    assert layer_amount(shape, 0, WHOLE) == (shape.num_layer_parameters, 0)


def test_a_rank_reads_its_rows_of_each_part_of_a_fused_matrix(tmp_path: Path) -> None:
    """4 query heads and 2 key/value heads of 8: the checkpoint's rows are 32 of q, 16 of k, 16 of v."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = shape_of(tmp_path, "Phi3ForCausalLM", head_dim=8, **sizes)
    spec = decoder_spec(shape, ModelPart(whole_model(1), Shard(1, 2))).layers[0].qkv
    (rows,) = spec.stacked()
    assert rows.name == "model.layers.0.self_attn.qkv_proj"
    assert (rows.rows, spec.num_outputs) == (slice(0, 32), 32)
    assert slices_of(rows.weight_part) == [(slice(16, 32),), (slice(40, 48),), (slice(56, 64),)]
    assert checkpoint_sizes(shape)["model.layers.0.self_attn.qkv_proj.weight"] == (64, 32)
    whole = AxisPart(range(3), 9, (range(3, 6), range(6, 9)))
    assert (len(whole), whole.is_whole) == (9, True)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' .* works: gelu_pytorch_tanh"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 is not supported for Gemma",
        ),
        ("GraniteForCausalLM", {"attention_multiplier": 0}, "attention_multiplier must be a number > 0"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "num_experts_per_tok 2 is more than num_local_experts 1"),
        ("MixtralForCausalLM", {"num_local_experts": 1 << 17}, "num_local_experts 131072 is not supported; works: 1 t"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers, given 'all'"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, "qkv_bias false is not supported; works: true"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; works: null"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention"]}, "layer_types must name 1 layers"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "mrope"}}}, "rope type 'mrope'"),
        (
            "Gemma3ForCausalLM",
            {
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_parameters and rope_scaling describe different rotary embeddings",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_named(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        shape_of(tmp_path, architecture, **changes)


def test_adapters_are_refused_for_experts_and_for_fused_matrices(tmp_path: Path) -> None:
    check_adapters(shape_of(tmp_path, "LlamaForCausalLM"))
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM has experts.*remove adapters"):
        check_adapters(shape_of(tmp_path, "MixtralForCausalLM"))
    with pytest.raises(ConfigError, match=r"Phi3ForCausalLM have one matrix for q, k and v.*remove adapters"):
        check_adapters(shape_of(tmp_path, "Phi3ForCausalLM"))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("Qwen2MoeForCausalLM", {"qkv_bias": False}), ("OlmoeForCausalLM", {"clip_qkv": 8.0})],
)
def test_a_value_that_the_decoder_lacks_is_unsupported(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as refused:
        shape_of(tmp_path, architecture, **changes)
    assert refused.value.fault == "Unsupported"
