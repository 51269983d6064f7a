"""mxfp4 checkpoints of gpt-oss, written from dense ones, and the weights that they represent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rt_quantised import Tensors

_BLOCK = 32
# A float of 4 bits: its sign is the highest bit.
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_HIGHEST = 2  # exponent of the largest float
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def mxfp4(weights: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns blocks [..., K / 32, 16] and scales [..., K / 32] of weights [..., K], and the weights they represent."""
    blocks = weights.float().unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(dim=-1).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - _HIGHEST
    powers = torch.exp2(exponents)[..., None]
    bits = ((blocks / powers)[..., None] - FLOATS).abs().argmin(dim=-1)
    stored = (bits[..., 0::2] | bits[..., 1::2] << 4).to(torch.uint8)
    plain = (FLOATS[bits] * powers).flatten(-2)
    return {"blocks": stored, "scales": (exponents + 127).to(torch.uint8)}, plain


def mxfp4_checkpoint(dense: Path, folder: Path) -> Path:
    """Writes a checkpoint of gpt-oss with quantised experts. Returns another folder, with the same weights dense."""
    plain_folder = folder.with_name(f"{folder.name}-plain")
    for target in (folder, plain_folder):
        shutil.copytree(dense, target)
    stored: Tensors = {}
    plain: Tensors = {}
    for name, values in load_file(dense / "model.safetensors").items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            found, of_experts = mxfp4(values.transpose(1, 2))
            stored.update((f"{name}_{suffix}", part.contiguous()) for suffix, part in found.items())
            plain[name] = of_experts.transpose(1, 2).contiguous()
        else:
            stored[name] = plain[name] = values
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return plain_folder
