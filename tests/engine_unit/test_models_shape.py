"""Shapes read from config.json in the dialects of transformers 4 and 5, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.errors import ModelError
from rayloom_engine.models.rope.parameters import RopeParameters
from rayloom_engine.models.shape import read_shape

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def folder_with(tmp_path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with the small config. A change with the value ... removes the field."""
    config = {field: value for field, value in {**SMALL, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_sizes_are_counted(tmp_path: Path) -> None:
    shape = read_shape(folder_with(tmp_path))
    assert (shape.head_dim, shape.checkpoint_dtype, shape.rms_norm_eps) == (2, "bfloat16", 1e-5)
    # In a layer, q and o have 8 x 8 parameters each, k and v have 8 x 4 each, gate, up and down have 8 x 16 each, and
    # two norms have 8 each. Embedding and head have 80 each, and the last norm has 8.
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
    assert shape.num_parameters == 2 * layer + 2 * 80 + 8
    assert shape.weight_bytes(2) == 2 * shape.num_parameters
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 4 * 2


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    untied = read_shape(folder_with(tmp_path)).num_parameters
    assert read_shape(folder_with(tmp_path, tie_word_embeddings=True)).num_parameters == untied - 80


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeParameters()),
        ({"rope_theta": 500000.0, "rope_scaling": None}, RopeParameters(theta=500000.0)),
        (
            {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default", "rope_theta": None}},
            RopeParameters(theta=500000.0),
        ),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeParameters(theta=7.0)),
        ({"architectures": ["MixtralForCausalLM"]}, RopeParameters(theta=1_000_000.0)),
        (
            {
                "rope_theta": 7.0,
                "rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 4.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            RopeParameters(theta=7.0, kind="linear", factor=4.0),
        ),
        (
            {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeParameters(theta=9.0, kind="linear", factor=4.0),
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 5.0,
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            RopeParameters(theta=5.0, kind="llama3", factor=8.0, original_max_position=32),
        ),
    ],
)
def test_rope_is_read_in_both_dialects(changes: dict[str, Any], rope: RopeParameters, tmp_path: Path) -> None:
    assert read_shape(folder_with(tmp_path, **changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 4}, (None, None)),  # llama has no windows, whatever the file says
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4}, (4, 4)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        (
            {  # transformers computes such a file of Mistral with its class of Ministral
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 4,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (None, 4),
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4}, (None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 4),
        ),
        (
            {  # every second layer below max_window_layers
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_hidden_layers": 6,
                "sliding_window": 4,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            (4, None, 4, None, None, None),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (4, None),
        ),
    ],
)
def test_windows_are_per_layer(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    shape = read_shape(folder_with(tmp_path, **changes))
    assert shape.layer_windows == windows
    assert shape.sliding_window == max((window for window in windows if window), default=None)


@pytest.mark.parametrize(
    ("changes", "switches"),
    [
        ({}, (False, False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({"architectures": ["Qwen2ForCausalLM"]}, (True, False, False, False)),
        ({"architectures": ["Qwen3ForCausalLM"]}, (False, False, False, True)),
        ({"architectures": ["MistralForCausalLM"]}, (False, False, False, False)),
        ({"architectures": ..., "model_type": "qwen3"}, (False, False, False, True)),
    ],
)
def test_switches_follow_from_the_architecture(
    changes: dict[str, Any], switches: tuple[bool, ...], tmp_path: Path
) -> None:
    shape = read_shape(folder_with(tmp_path, **changes))
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm) == switches


@pytest.mark.parametrize(
    ("generation", "changes", "ids"),
    [
        (None, {}, (2,)),
        (None, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"eos_token_id": None}, ()),
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"temperature": 0.5}, {}, (2,)),
        (None, {"eos_token_id": -1}, ()),
        (None, {"eos_token_id": [2, None, -1]}, (2,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    generation: dict[str, Any] | None, changes: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_shape(folder_with(tmp_path, generation, **changes)).eos_token_ids == ids


def test_a_size_may_be_a_whole_number_written_as_a_float(tmp_path: Path) -> None:
    shape = read_shape(folder_with(tmp_path, intermediate_size=11008.0))
    assert (shape.intermediate_size, type(shape.intermediate_size)) == (11008, int)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported; works: LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": ..., "model_type": "mamba"}, "architecture model_type mamba is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quant_method hqq is not supported; works: awq, gptq, "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; works: silu"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "'mrope' is not supported; works: default, linear, dynamic, yarn, longrope, llama3, proportional",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "'one per layer type' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_parameters and rope_scaling describe different rotary embeddings; write all values into rope_param",
        ),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor 0.7 rotates 1 of 2 elements of a head; works: an even"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8}}, "factor is missing"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
            "long_factor must be a list of 1 numbers, given 2 elements",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}},
            r"short_factor\[0\] must be a number > 0",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"hidden_size": ...}, "hidden_size is missing; it must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number >= 1, given 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number >= 1, given 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number > 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 2,
            },
            "layer_types must name 2 layers",
        ),
    ],
)
def test_an_unsupported_feature_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_shape(folder_with(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json does not exist"), ("{", "is not JSON"), ("[]", "must hold a JSON object, found list")],
)
def test_a_broken_config_file_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_shape(tmp_path)
