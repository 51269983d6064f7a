"""Rotary embeddings of every kind, in the form of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [],
    "long_factor": [],
}
# field of LONGROPE -> function: index of a pair -> its factor; the lists have an entry for each pair of a head
FACTORS: dict[str, Callable[[int], float]] = {
    "short_factor": lambda pair: 1.0 + pair / 100,
    "long_factor": lambda pair: 1.0 + pair / 4,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-slow-theta": {**YARN, "rope_theta": 150_000.0, "factor": 32.0, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-half-of-mscale": {**YARN, "mscale": 0.707},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.25},
    "longrope": LONGROPE,
    "longrope-attention-factor": {**LONGROPE, "attention_factor": 1.5},
    "longrope-factor": {**LONGROPE, "factor": 16.0},
    "proportional": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "proportional-factor": {
        "rope_type": "proportional",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "factor": 2.0,
    },
}


def config_folder(folder: Path, *, head_dim: int = 64, **changes: Any) -> Path:
    """A folder with the config.json of a small Llama with a context of 4096 tokens."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
