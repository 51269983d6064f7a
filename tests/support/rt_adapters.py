"""LoRA adapters with random weights, written in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rayloom_engine.models.decoder_spec import decoder_spec
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import whole_part

ALL_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    matrices: Sequence[str] = ALL_MATRICES,
    size: float = 1.0,
    **settings: Any,
) -> Path:
    """Writes an adapter for the model in the folder `model` into `folder`, and returns `folder`.

    `size`: the size of the adapter's updates, relative to the products of the model's matrices. `settings`: further
    fields of adapter_config.json.
    """
    shape = read_shape(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in decoder_spec(shape, whole_part(shape.num_layers)).layers:
        for linear in layer.linears:
            for name, rows in linear.outputs.items():
                if not name.endswith(tuple(matrices)):
                    continue
                a = torch.randn(rank, linear.inputs.size, generator=generator) * linear.inputs.size**-0.5
                b = torch.randn(rows.size, rank, generator=generator) * size * rank**-0.5
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(matrices),
        "bias": "none",
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def peft_logits(model: Path, adapter: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, [T, V], float32, by PEFT on transformers' eager attention."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(torch.tensor([list(token_ids)])).logits[0]
    return logits
