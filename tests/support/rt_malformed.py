"""Malformed model files: writers without checks, and the command that must refuse these files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayloom_engine.cli.commands import run

DEEP = "[" * 100_000 + "]" * 100_000

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
_SIZES = {
    "model.embed_tokens.weight": (12, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
}
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


@dataclass(frozen=True)
class Raw:
    """JSON text that cannot be written from a Python value."""

    text: str


def sound_folder(folder: Path) -> Path:
    """A model that can be served. Each case breaks one of its files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    weights = {name: np.zeros(sizes, dtype=np.float32) for name, sizes in _SIZES.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def config_text(**changes: Any) -> str:
    """config.json with changed fields. The value ... leaves a field out; a Raw is written unchanged."""
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    parts = [
        f"{json.dumps(name)}: {value.text if isinstance(value, Raw) else json.dumps(value)}"
        for name, value in fields.items()
    ]
    return "{" + ", ".join(parts) + "}"


def text(value: str | bytes) -> bytes:
    """A GGUF string: length and bytes."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return entry(name, UINT32, struct.pack("<I", value))


def f32(name: str, value: float) -> bytes:
    return entry(name, FLOAT32, struct.pack("<f", value))


def string(name: str | bytes, value: str | bytes) -> bytes:
    return entry(name, STRING, text(value))


def array(name: str, kind: int, count: int, elements: bytes) -> bytes:
    return entry(name, ARRAY, struct.pack("<IQ", kind, count) + elements)


def strings(name: str, values: Sequence[str | bytes]) -> bytes:
    return array(name, STRING, len(values), b"".join(map(text, values)))


def tensor(name: str | bytes, sizes: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry in the header; kind 0 is F32."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


ENTRIES: dict[str, bytes] = {
    "general.architecture": string("general.architecture", "llama"),
    "llama.block_count": u32("llama.block_count", 1),
    "llama.context_length": u32("llama.context_length", 64),
    "llama.embedding_length": u32("llama.embedding_length", 8),
    "llama.feed_forward_length": u32("llama.feed_forward_length", 16),
    "llama.attention.head_count": u32("llama.attention.head_count", 2),
    "llama.attention.layer_norm_rms_epsilon": f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
    "tokenizer.ggml.model": string("tokenizer.ggml.model", "gpt2"),
    "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", ["a", "b", "ab"]),
    "tokenizer.ggml.merges": strings("tokenizer.ggml.merges", ["a b"]),
}
TENSORS: dict[str, bytes] = {
    "token_embd.weight": tensor("token_embd.weight", (8, 12)),
    "blk.0.attn_q.weight": tensor("blk.0.attn_q.weight", (8, 8)),
}


def gguf_file(
    entries: dict[str, bytes | None] | None = None,
    tensors: dict[str, bytes | None] | None = None,
    *,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    cut: Callable[[bytes], bytes] = bytes,
) -> bytes:
    """A small file. The arguments change or add entries and tensors. The value None removes an entry or a tensor."""
    made_entries = [value for value in {**ENTRIES, **(entries or {})}.values() if value is not None]
    made_tensors = [value for value in {**TENSORS, **(tensors or {})}.values() if value is not None]
    head = magic + version
    head += struct.pack(
        "<QQ",
        len(made_tensors) if num_tensors is None else num_tensors,
        len(made_entries) if num_entries is None else num_entries,
    )
    return cut(head + b"".join([*made_entries, *made_tensors]) + bytes(1024))


@contextlib.contextmanager
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At the end of the block, restores the logging and the number of torch's threads. The command sets both."""
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setenv("MKL_NUM_THREADS", os.environ.get("MKL_NUM_THREADS", "1"))
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def assert_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *said: str) -> None:
    code = run(arguments)
    error = capsys.readouterr().err
    sentences = [line for line in error.splitlines() if line.startswith("rayloom-engine: ")]
    assert (code, len(sentences)) == (78, 1), error
    assert "Traceback" not in error
    assert len(sentences[0]) < 1500
    for words in said:
        assert words in sentences[0]


def inspect(model: Path | str) -> list[str]:
    return ["inspect", "--model", str(model)]


def generate(model: Path | str) -> list[str]:
    return ["generate", "--model", str(model), "--prompt", "a", "--device", "cpu", "--threads", "1", "--no-progress"]


def put(path: Path, content: str | bytes | None) -> None:
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
