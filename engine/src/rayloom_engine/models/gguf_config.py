"""A GGUF file's metadata as Hugging Face's config.json and generation_config.json. Pure: dictionaries in and out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rayloom_engine.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Meta's scaling parameters for Llama 3.1 and 3.2. GGUF does not hold them, only the divisors that follow from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_TRAINED = 1.0, 4.0, 8192


def hugging_face_config(
    fields: Mapping[str, Any],
    tensor_names: Collection[str],
    vocab_size: int,
    dtype: str,
    rope_divisors: np.ndarray[Any, Any] | None,
) -> dict[str, Any]:
    """config.json. `rope_divisors` is the tensor rope_freqs.weight, which Llama 3.1 files have.

    Raises ModelError for an architecture, or a feature of one, that the engine does not do.
    """
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {arch!r} is not supported; works: {', '.join(ARCHITECTURES)}", "Unsupported"
        )
    if fields.get(f"{arch}.expert_count", 0):
        raise ModelError(
            f"GGUF architecture {arch} with experts (mixture of experts) is not supported; works: dense models",
            "Unsupported",
        )
    hidden_size = _required(fields, f"{arch}.embedding_length")
    num_heads = _required(fields, f"{arch}.attention.head_count")
    head_dim = fields.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    if fields.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"GGUF {arch}.rope.dimension_count differs from the head size {head_dim}; works: whole heads", "Unsupported"
        )
    window = fields.get(f"{arch}.attention.sliding_window")
    if window and arch != "llama":
        raise ModelError(
            f"GGUF {arch}.attention.sliding_window is not supported; works: with llama files (Mistral)", "Unsupported"
        )

    config: dict[str, Any] = {
        "architectures": [_hugging_face_architecture(arch, window)],
        "model_type": "mistral" if window else arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _required(fields, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _required(fields, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": _required(fields, f"{arch}.context_length"),
        "rms_norm_eps": _short_float(_required(fields, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(fields, arch, head_dim, rope_divisors),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "dtype": dtype,
        **_token_ids(fields),
    }
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # for readers of transformers 4's dialect
    if arch == "llama" and not window:
        config["attention_bias"] = "blk.0.attn_output.bias" in tensor_names
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensor_names
    if arch == "qwen3":
        config["attention_bias"] = "blk.0.attn_output.bias" in tensor_names
    if window:
        config["sliding_window"] = window
    return config


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json. Both the end of the text and the end of a turn end a generation."""
    ids = _token_ids(fields)
    end_of_turn = fields.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [token_id for token_id in (ids.get("eos_token_id"), end_of_turn) if token_id is not None]
    return ids


def _hugging_face_architecture(arch: str, window: int | None) -> str:
    if window:
        return "MistralForCausalLM"
    return {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]


def _required(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ModelError(f"GGUF file lacks {key}; it is not complete")
    value = fields[key]
    if isinstance(value, list):
        raise ModelError(f"GGUF {key} differs from layer to layer, which is not supported", "Unsupported")
    return value


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(fields: Mapping[str, Any], arch: str, head_dim: int, divisors: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    theta = _short_float(fields.get(f"{arch}.rope.freq_base", 10000.0))
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if divisors is not None:
        return _llama3_rope(theta, head_dim, divisors)
    if scaling == "linear":
        factor = _short_float(_required(fields, f"{arch}.rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise ModelError(
            f"GGUF {arch}.rope.scaling.type {scaling!r} is not supported; works: none, linear, llama3", "Unsupported"
        )
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(theta: float, head_dim: int, divisors: np.ndarray[Any, Any]) -> dict[str, Any]:
    factor = _short_float(float(divisors.max()))
    turns = _LLAMA3_TRAINED * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-3):
        raise ModelError(
            "GGUF rope_freqs.weight is not Llama 3's scaling; works: Llama 3.1's low 1, high 4, trained 8192",
            "Unsupported",
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_TRAINED,
    }


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    ids = {}
    for name, role in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (token_id := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            ids[f"{role}_token_id"] = token_id
    return ids
