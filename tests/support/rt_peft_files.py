"""A tiny model's config.json and LoRA adapters for it, written without torch. No test runs the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_HIDDEN = 16


def write_tiny_config(folder: Path) -> Path:
    """Writes config.json of a Llama with one layer of 16 dimensions into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 258,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_tiny_adapter(folder: Path, *, seed: int = 0, rank: int = 4) -> Path:
    """Writes an adapter for that model. The adapter updates only q_proj."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": random.standard_normal((rank, _HIDDEN)).astype(np.float32),
        f"{name}.lora_B.weight": random.standard_normal((_HIDDEN, rank)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
