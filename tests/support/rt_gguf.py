"""Tiny GGUF files, written from tiny checkpoints in the way of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_ARCHITECTURES["Qwen3ForCausalLM"] = "qwen3"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
    tokenizer_model: str = "gpt2",
    pre: str = "smollm",
    rope_divisors: np.ndarray[Any, Any] | None = None,
    without: tuple[str, ...] = (),
    extra_tensors: tuple[str, ...] = (),
    architecture: str | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Writes the checkpoint as GGUF. Returns Hugging Face name -> tensor with the values in the file.

    As in llama.cpp, matrices are stored as `kind`, and all other tensors as float32. `kinds` maps the name of a
    layer's matrix, such as v_proj, to another kind for this matrix.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture or arch)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window") and arch == "llama":
        writer.add_sliding_window(config["sliding_window"])
    _add_tokenizer(writer, tokenizer_model, pre, config["vocab_size"])
    tensors = {}
    for name, values in load_file(checkpoint / "model.safetensors").items():
        stored_as = kinds.get(name.split(".")[-2], kind) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        rows = values
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp rotates pairs of neighbouring elements. So its converter interleaves the two halves of each
            # head, as is done here.
            rows = values.reshape(-1, 2, head_dim // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        data = gguf.quantize(np.ascontiguousarray(rows), stored_as)
        tensors[name] = gguf.dequantize(gguf.quantize(values, stored_as), stored_as).reshape(values.shape)
        if _gguf_name(name) not in without:
            writer.add_tensor(_gguf_name(name), data, raw_dtype=stored_as)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    for name in extra_tensors:
        writer.add_tensor(name, np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def _add_tokenizer(writer: gguf.GGUFWriter, model: str, pre: str, vocab_size: int) -> None:
    from tokenizers import pre_tokenizers

    tokens = ["<pad>", "<bos>", "<eos>", "<turn>", *sorted(pre_tokenizers.ByteLevel.alphabet())][: vocab_size - 1]
    tokens.append("ab")
    control, user_defined, normal = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control, control, control, user_defined, *[normal] * (len(tokens) - 4)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(pre == "llama-bpe")
    writer.add_chat_template("{{ messages[0]['content'] }}")
