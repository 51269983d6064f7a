"""Converts a GGUF file's metadata to Hugging Face's config.json and generation_config.json.

Pure: reads and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.checkpoint.limits import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_NORM_EPS,
    MAX_POSITIONS,
    MAX_ROPE_FACTOR,
    MAX_ROPE_THETA,
    MAX_SIZE,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Meta's scaling parameters for Llama 3.1 and 3.2. GGUF stores only the divisors that result from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_TRAINED = 1.0, 4.0, 8192
_LARGEST_ID = (1 << 64) - 1  # largest value of the integer types in a GGUF file


def hugging_face_config(
    fields: ConfigJson,
    tensor_names: Collection[str],
    vocab_size: int,
    dtype: str,
    rope_divisors: np.ndarray[Any, Any] | None,
) -> dict[str, Any]:
    """Returns the content of config.json, from a GGUF file's fields.

    `rope_divisors`: the tensor rope_freqs.weight, if the file has it (Llama 3.1). Raises ModelError for architectures
    and features that the engine does not support, and for sizes beyond `checkpoint.limits`.
    """
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{fields.path}: GGUF architecture {shown(arch)} is not supported; works: {', '.join(ARCHITECTURES)}",
            "Unsupported",
        )
    if fields.count("split.count", default=1, at_least=0) > 1:
        raise ModelError(
            f"{fields.path}: the GGUF file is one part of several, which is not supported; "
            "join them with llama-gguf-split --merge",
            "Unsupported",
        )
    if fields.count(f"{arch}.expert_count", default=0, at_least=0):
        raise ModelError(
            f"{fields.path}: GGUF architecture {arch} with experts (mixture of experts) is not supported; "
            "works: dense models",
            "Unsupported",
        )
    hidden_size = _count(fields, f"{arch}.embedding_length", at_most=MAX_SIZE)
    num_heads = _count(fields, f"{arch}.attention.head_count", at_most=MAX_HEADS)
    head_dim = _head_dim(fields, arch, hidden_size, num_heads)
    window = fields.count(f"{arch}.attention.sliding_window", default=0, at_least=0)
    if window and arch != "llama":
        raise ModelError(
            f"{fields.path}: GGUF {arch}.attention.sliding_window is not supported; works: with llama files (Mistral)",
            "Unsupported",
        )

    config: dict[str, Any] = {
        "architectures": [_hugging_face_architecture(arch, window)],
        "model_type": "mistral" if window else arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _count(fields, f"{arch}.feed_forward_length", at_most=MAX_SIZE),
        "num_hidden_layers": _count(fields, f"{arch}.block_count", at_most=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(fields, f"{arch}.attention.head_count_kv", num_heads, at_most=MAX_HEADS),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": _count(fields, f"{arch}.context_length", at_most=MAX_POSITIONS),
        "rms_norm_eps": _short_float(fields.number(f"{arch}.attention.layer_norm_rms_epsilon", at_most=MAX_NORM_EPS)),
        "rope_parameters": _rope(fields, arch, head_dim, rope_divisors),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "dtype": dtype,
        **_token_ids(fields, vocab_size),
    }
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # for readers that know only transformers 4's field
    if arch == "llama" and not window:
        config["attention_bias"] = "blk.0.attn_output.bias" in tensor_names
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensor_names
    if arch == "qwen3":
        config["attention_bias"] = "blk.0.attn_output.bias" in tensor_names
    if window:
        config["sliding_window"] = window
    return config


def generation_config(fields: ConfigJson, vocab_size: int) -> dict[str, Any]:
    """Returns the content of generation_config.json.

    Its `eos_token_id` lists the token for the end of the text and the token for the end of a turn. So each of them ends
    a generation.
    """
    ids: dict[str, Any] = dict(_token_ids(fields, vocab_size))
    end_of_turn = _token_id(fields, "tokenizer.ggml.eot_token_id", vocab_size)
    if end_of_turn is not None and end_of_turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [token_id for token_id in (ids.get("eos_token_id"), end_of_turn) if token_id is not None]
    return ids


def _head_dim(fields: ConfigJson, arch: str, hidden_size: int, num_heads: int) -> int:
    if hidden_size < num_heads:
        raise ModelError(
            f"{fields.path}: {arch}.embedding_length {hidden_size} is less than {arch}.attention.head_count {num_heads}"
        )
    head_dim = _count(fields, f"{arch}.attention.key_length", hidden_size // num_heads, at_most=MAX_SIZE)
    if fields.count(f"{arch}.rope.dimension_count", default=head_dim) != head_dim:
        raise ModelError(
            f"{fields.path}: GGUF {arch}.rope.dimension_count differs from the head size {head_dim}; "
            "works: whole heads",
            "Unsupported",
        )
    if head_dim % 2 != 0:
        raise ModelError(f"{fields.path}: the head size {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _hugging_face_architecture(arch: str, window: int) -> str:
    if window:
        return "MistralForCausalLM"
    return {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]


def _count(fields: ConfigJson, key: str, default: int | None = None, *, at_most: int) -> int:
    if isinstance(fields.get(key), list):
        raise ModelError(
            f"{fields.path}: GGUF {key} differs from layer to layer, which is not supported", "Unsupported"
        )
    return fields.count(key, default, at_most=at_most)


def _short_float(value: float) -> float:
    """Returns the shortest decimal number that is the same float32. GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(fields: ConfigJson, arch: str, head_dim: int, divisors: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    theta = _short_float(fields.number(f"{arch}.rope.freq_base", default=10000.0, at_most=MAX_ROPE_THETA))
    factor = _rope_factor(fields, arch)
    # As in llama.cpp, a factor without a type is that of linear scaling.
    scaling = fields.text(f"{arch}.rope.scaling.type", default="none" if factor is None else "linear")
    if scaling == "linear" and factor == 1.0:
        scaling = "none"
    if scaling not in ("none", "linear") or (scaling == "linear" and divisors is not None):
        raise ModelError(
            f"{fields.path}: GGUF {arch}.rope.scaling.type {shown(scaling)} "
            f"{'' if divisors is None else 'with rope_freqs.weight '}is not supported; works: none, linear, llama3",
            "Unsupported",
        )
    if divisors is not None:
        return _llama3_rope(fields, theta, head_dim, divisors)
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if factor is None:
        raise ModelError(f"{fields.path}: {arch}.rope.scaling.factor is missing; it must be a number")
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _rope_factor(fields: ConfigJson, arch: str) -> float | None:
    """Returns the factor of the rotary embedding, from the present field or the former one; None if there is none."""
    for name in (f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"):
        if fields.get(name):  # 0 means absent, as in llama.cpp
            return _short_float(fields.number(name, at_most=MAX_ROPE_FACTOR))
    return None


def _llama3_rope(fields: ConfigJson, theta: float, head_dim: int, divisors: np.ndarray[Any, Any]) -> dict[str, Any]:
    if divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and divisors.min() > 0:
        factor = _short_float(float(divisors.max()))
        turns = _LLAMA3_TRAINED * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
        blend = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        expected = 1.0 / ((1.0 - blend) / factor + blend)
        if np.allclose(expected, divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_TRAINED,
            }
    raise ModelError(
        f"{fields.path}: GGUF rope_freqs.weight is not Llama 3's scaling; "
        "works: Llama 3.1's low 1, high 4, trained 8192",
        "Unsupported",
    )


def _token_ids(fields: ConfigJson, vocab_size: int) -> dict[str, int]:
    ids = {}
    for name, role in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (token_id := _token_id(fields, f"tokenizer.ggml.{name}_token_id", vocab_size)) is not None:
            ids[f"{role}_token_id"] = token_id
    return ids


def _token_id(fields: ConfigJson, key: str, vocab_size: int) -> int | None:
    """Returns the token id in a field.

    Returns None if the field is absent, or if the id is beyond the vocabulary. Some files write such an id for "none".
    """
    if fields.get(key) is None:
        return None
    token_id = fields.count(key, at_least=0, at_most=_LARGEST_ID)
    return token_id if token_id < vocab_size else None
