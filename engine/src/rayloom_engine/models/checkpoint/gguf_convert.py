"""Converts a GGUF file into a Hugging Face folder with weights, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson, refuses_broken
from rayloom_engine.models.checkpoint.gguf_config import generation_config, hugging_face_config
from rayloom_engine.models.checkpoint.gguf_file import GgufTensor, read_gguf
from rayloom_engine.models.checkpoint.gguf_tokenizer import write_tokenizer
from rayloom_engine.models.checkpoint.limits import MAX_SIZE, MAX_VOCAB
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_PIECE_VALUES = 8 * 1024 * 1024  # values dequantised in one call (32 MiB of float32)


def convert_gguf(source: Path, folder: Path, progress: Progress = no_progress, *, keeps_blocks: bool = False) -> None:
    """Writes config.json, generation_config.json, the tokenizer and model.safetensors into `folder`, which must exist.

    With `keeps_blocks`, quantised matrices stay as they are: tensors of bytes, which models/quantised/gguf_blocks.py
    reads. All other tensors get the type of the first layer's q matrix, or bfloat16 if this matrix is quantised. The
    conversion has only a few pieces of 32 MiB in memory at a time, or one matrix of q or k. For a broken or unsupported
    file, raises ModelError before any weight is written.
    """
    with refuses_broken(source):
        config, fields, tensors = write_config(source, folder, keeps_blocks=keeps_blocks)
        dtype = _stored_dtype(tensors["blk.0.attn_q.weight"].kind)
        names = {name: _hugging_face_name(name, source) for name in tensors}
        for tensor in tensors.values():
            _check_rows(tensor, source, config)
            if keeps_blocks and _is_quantised(tensor):
                _dequantize(tensor.data[:1], tensor, source)  # raises for a type that no code can read
        write_tokenizer(fields, folder)

    specs = [
        TensorSpec(name=names[name], shape=tensor.data.shape, is_bytes=True)
        if keeps_blocks and _is_quantised(tensor)
        else TensorSpec(name=names[name], shape=tuple(reversed(tensor.sizes)))  # GGUF's first size varies fastest
        for name, tensor in tensors.items()
    ]
    with (folder / "model.safetensors").open("wb") as file, SafetensorsWriter(file, specs, dtype) as writer:
        progress("convert", 0, writer.num_bytes, "bytes")
        for tensor in tensors.values():
            is_interleaved = _interleaved_heads(tensor.name, config)
            if keeps_blocks and _is_quantised(tensor):
                writer.write_bytes(_half_split(tensor.data, config["head_dim"]) if is_interleaved else tensor.data)
                progress("convert", writer.num_written, writer.num_bytes, "bytes")
                continue
            for piece in _pieces(tensor, source, is_interleaved, config["head_dim"]):
                writer.write(piece)
                progress("convert", writer.num_written, writer.num_bytes, "bytes")


def write_config(
    source: Path, folder: Path, *, keeps_blocks: bool = False
) -> tuple[dict[str, Any], ConfigJson, dict[str, GgufTensor]]:
    """Writes config.json and generation_config.json into `folder`. `keeps_blocks`: as in `convert_gguf`.

    Returns the config, the GGUF file's own fields, and its tensors by name. Raises ModelError as `convert_gguf` does.
    """
    file = read_gguf(source)
    fields = ConfigJson(path=source, values=file.fields)
    tensors = dict(file.tensors)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in tensors:
            raise ModelError(f"{source}: the GGUF file lacks the tensor {name}; works: dense decoder-only models")
        if len(tensors[name].sizes) != 2:
            raise ModelError(f"{source}: the tensor {name} must have 2 dimensions, it has 1")
    vocab_size = tensors["token_embd.weight"].sizes[1]
    if vocab_size > MAX_VOCAB:
        raise ModelError(
            f"{source}: token_embd.weight has {vocab_size} rows, which is not supported; works: 1 to {MAX_VOCAB}",
            "Unsupported",
        )
    divisors_tensor = tensors.pop(_ROPE_DIVISORS, None)
    divisors = None if divisors_tensor is None else _divisors(divisors_tensor, source)
    dtype = _stored_dtype(tensors["blk.0.attn_q.weight"].kind)
    config = hugging_face_config(fields, tensors.keys(), vocab_size, dtype, divisors)
    if keeps_blocks:
        config |= _quantization_config(tensors, source)
    documents = (("config.json", config), ("generation_config.json", generation_config(fields, vocab_size)))
    for file_name, document in documents:
        (folder / file_name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return config, fields, tensors


def _quantization_config(tensors: dict[str, GgufTensor], source: Path) -> dict[str, Any]:
    """Returns the field that models/quantised/read_scheme.py reads; an empty dict if no matrix is quantised."""
    kinds = {
        _hugging_face_name(name, source).removesuffix(".weight"): tensor.kind
        for name, tensor in tensors.items()
        if _is_quantised(tensor)
    }
    if not kinds:
        return {}
    blocks = {kind.name: list(gguf.GGML_QUANT_SIZES[kind]) for kind in set(kinds.values())}
    names = {name: kind.name for name, kind in kinds.items()}
    return {"quantization_config": {"quant_method": "gguf", "blocks": blocks, "kinds": names}}


def _is_quantised(tensor: GgufTensor) -> bool:
    block_values, _ = gguf.GGML_QUANT_SIZES[tensor.kind]
    return len(tensor.sizes) == 2 and block_values > 1


def _divisors(tensor: GgufTensor, source: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    if len(tensor.sizes) != 1 or tensor.sizes[0] > MAX_SIZE:
        raise ModelError(f"{source}: {tensor.name} has the sizes {list(tensor.sizes)}; it must be a vector of a head's")
    return _values(tensor, source)


def _check_rows(tensor: GgufTensor, source: Path, config: dict[str, Any]) -> None:
    """Raises ModelError if the rows are not a whole number of heads, because `_half_split` reorders whole heads."""
    num_rows = tensor.sizes[-1]
    if _interleaved_heads(tensor.name, config) and num_rows % config["head_dim"] != 0:
        raise ModelError(
            f"{source}: {tensor.name} has {num_rows} rows, which are no whole heads of {config['head_dim']}"
        )


def _stored_dtype(kind: gguf.GGMLQuantizationType) -> str:
    kinds = gguf.GGMLQuantizationType
    return {kinds.F32: "float32", kinds.F16: "float16"}.get(kind, "bfloat16")


def _hugging_face_name(name: str, source: Path) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ModelError(f"{source}: the tensor {word(name)} belongs to no layer that this engine has; works: dense models")


def _interleaved_heads(name: str, config: dict[str, Any]) -> bool:
    """Returns whether the rows of each head are in GGUF's order of pairs, see `_half_split`.

    This is the case for q and k of the llama family.
    """
    return config["model_type"] in ("llama", "mistral") and name.split(".")[-2] in ("attn_q", "attn_k")


def _pieces(
    tensor: GgufTensor, source: Path, interleaved: bool, head_dim: int
) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """Yields the tensor's values in pieces of whole heads."""
    if len(tensor.sizes) == 1:
        values = _values(tensor, source)
        yield _half_split(values, head_dim) if interleaved else values
        return
    row_values = tensor.sizes[0]
    rows = max(1, _PIECE_VALUES // (row_values * head_dim)) * head_dim
    for start in range(0, tensor.sizes[1], rows):
        values = _dequantize(tensor.data[start : start + rows], tensor, source)
        yield _half_split(values, head_dim) if interleaved else values


def _half_split(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Returns each head's rows, reordered from pairs (0, h, 1, h + 1, ...) to halves (0, 1, ..., h, h + 1, ...)."""
    by_head = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return by_head.swapaxes(1, 2).reshape(rows.shape)


def _values(tensor: GgufTensor, source: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    return _dequantize(tensor.data, tensor, source)


def _dequantize(data: np.ndarray[Any, Any], tensor: GgufTensor, source: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(data, tensor.kind)
    except NotImplementedError as error:
        raise ModelError(
            f"{source}: {tensor.name} has type {tensor.kind.name}, which cannot be dequantised; "
            f"works: F32, F16, BF16, Q4_0 to Q8_0, the K and IQ types"
        ) from error
    return values
