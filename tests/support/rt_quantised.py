"""Quantised checkpoints, written from dense ones in the published formats, and the weights that they represent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of the outputs in an int32, from the lowest bits on


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    `quantise`: function of a matrix that returns its tensors by suffix, and the weights that they represent.
    """

    config: Mapping[str, Any]
    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def integers(
    weight: torch.Tensor, group: int, bits: int, is_symmetric: bool, scale_type: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [N, K] below 2 ** bits, scales [N, G], zero points [N, G], and the weights that they represent."""
    top = (1 << bits) - 1
    grouped = weight.float().view(len(weight), -1, group)
    if is_symmetric:
        scales = (grouped.abs().amax(dim=2) / (top // 2)).to(scale_type)
        zeros = torch.full_like(scales, top // 2 + 1, dtype=torch.float32)
    else:
        low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
        scales = ((high - low) / top).to(scale_type)
        zeros = (-low / scales.float()).round().clamp(0, top)
    q = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    plain = (q - zeros[..., None]) * scales.float()[..., None]
    return q.long().view(weight.shape), scales, zeros.long(), plain.view(weight.shape)


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [..., n / per word] from integers [..., n]. The first index of `order` is in the lowest bits."""
    per_word = 32 // bits
    places = values.view(*values.shape[:-1], -1, per_word)
    packed = torch.zeros(places.shape[:-1], dtype=torch.int64)
    for place, index in enumerate(order or range(per_word)):
        packed |= places[..., index] << (bits * place)
    return packed.to(torch.int32)  # keeps the lowest 32 bits


def awq(weight: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    q, scales, zeros, plain = integers(weight, group, 4, is_symmetric=False)
    tensors = {
        "qweight": words(q.T.contiguous(), 4, _AWQ_ORDER),
        "qzeros": words(zeros.T.contiguous(), 4, _AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return tensors, plain


def gptq(
    weight: torch.Tensor, group: int, bits: int = 4, is_symmetric: bool = True, zero_step: int = 1
) -> tuple[Tensors, torch.Tensor]:
    size = weight.shape[1] if group == -1 else group
    q, scales, zeros, plain = integers(weight, size, bits, is_symmetric)
    if zero_step and not is_symmetric:  # the first format cannot store a zero point of 0
        zeros = zeros.clamp(min=1)
        plain = ((q.view(*zeros.shape, -1) - zeros[..., None]) * scales.float()[..., None]).view(weight.shape)
    tensors = {
        "qweight": words(q, bits).T.contiguous(),
        "qzeros": words((zeros - zero_step).T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // size).to(torch.int32),
    }
    return tensors, plain


def packed(weight: torch.Tensor, group: int, bits: int = 4, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    size = weight.shape[1] if group == -1 else group
    q, scales, zeros, plain = integers(weight, size, bits, is_symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": words(q, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, plain


def w8a8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    q = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": q, "weight_scale": scales}, q.float() * scales.float()


def float8(weight: torch.Tensor, kind: str, suffix: str) -> tuple[Tensors, torch.Tensor]:
    """`kind`: tensor, channel or block. Blocks are 64 x 32, so a matrix has several, and some of them are cut."""
    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (64, 32)}[kind]
    scales = torch.stack(
        [
            torch.stack([part.abs().amax() / 448 for part in stripe.split(columns, dim=1)])
            for stripe in weight.split(rows, dim=0)
        ]
    )
    wide = scales.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    stored = (weight / wide).to(torch.float8_e4m3fn)
    plain = stored.float() * wide
    return {"weight": stored, suffix: scales[0, 0] if kind == "tensor" else scales}, plain


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}

FORMATS: dict[str, Format] = {
    "awq": Format({**_AWQ, "group_size": 32}, lambda weight: awq(weight, 32)),
    "awq-64": Format({**_AWQ, "group_size": 64}, lambda weight: awq(weight, 64)),
    "gptq": Format({**_GPTQ, "group_size": 32}, lambda weight: gptq(weight, 32)),
    "gptq-channel": Format({**_GPTQ, "group_size": -1}, lambda weight: gptq(weight, -1)),
    "gptq-asymmetric": Format(
        {**_GPTQ, "group_size": 32, "sym": False}, lambda weight: gptq(weight, 32, is_symmetric=False)
    ),
    "gptq-v2": Format(
        {**_GPTQ, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 32, is_symmetric=False, zero_step=0),
    ),
    "gptq-8": Format({**_GPTQ, "group_size": 32, "bits": 8}, lambda weight: gptq(weight, 32, bits=8)),
    "pack-quantized": Format(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), lambda weight: packed(weight, 32)
    ),
    "pack-asymmetric": Format(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda weight: packed(weight, 32, is_symmetric=False),
    ),
    "int-quantized": Format(_compressed("int-quantized", num_bits=8, strategy="channel"), w8a8),
    "float-quantized": Format(
        _compressed("float-quantized", num_bits=8, strategy="channel", type="float"),
        lambda weight: float8(weight, "channel", "weight_scale"),
    ),
    "fp8": Format({"quant_method": "fp8"}, lambda weight: float8(weight, "tensor", "weight_scale")),
    "fp8-block": Format(
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        lambda weight: float8(weight, "block", "weight_scale_inv"),
    ),
}


def quantised_checkpoint(dense: Path, name: str, folder: Path, *, skipped: tuple[str, ...] = ()) -> Path:
    """Writes the checkpoint in one of FORMATS into `folder`. Returns another folder, with its dense weights.

    Matrices whose name contains one of `skipped` stay dense.
    """
    form = FORMATS[name]
    plain_folder = folder.with_name(f"{folder.name}-plain")
    for target in (folder, plain_folder):
        shutil.copytree(dense, target)
    stored: Tensors = {}
    plain: Tensors = {}
    for tensor, values in load_file(dense / "model.safetensors").items():
        is_matrix = tensor.endswith("_proj.weight") and not any(part in tensor for part in skipped)
        plain[tensor] = values
        if not is_matrix:
            stored[tensor] = values
            continue
        found, plain[tensor] = form.quantise(values)
        stored.update((f"{tensor.removesuffix('.weight')}.{suffix}", part) for suffix, part in found.items())
    contiguous = {tensor: values.contiguous() for tensor, values in stored.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**form.config, **({"modules_to_not_convert": list(skipped)} if skipped else {})}
    (folder / "config.json").write_text(json.dumps(config))
    return plain_folder


def k_checkpoint(dense: Path, folder: Path, kinds: Mapping[str, str]) -> Path:
    """Writes the checkpoint into `folder`, as the conversion of a GGUF file does, with random blocks of K types.

    Returns another folder, with the weights that the blocks represent. `kinds`: the last name of a matrix, such as
    v_proj, -> Q4_K or Q6_K; other matrices stay dense. The weights' mean is 0, and their deviation is that of the dense
    weights.
    """
    random = np.random.default_rng(0)
    plain_folder = folder.with_name(f"{folder.name}-plain")
    for target in (folder, plain_folder):
        shutil.copytree(dense, target)
    stored = load_file(dense / "model.safetensors")
    plain = dict(stored)
    of_matrices: dict[str, str] = {}
    for tensor, values in plain.items():
        name = kinds.get(tensor.split(".")[-2])
        if name is None or values.ndim != 2:
            continue
        of_matrices[tensor.removesuffix(".weight")] = name
        kind = gguf.GGMLQuantizationType[name]
        inputs, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (len(values), values.shape[1] // inputs, num_bytes), dtype=np.uint8)
        halves = slice(-2, None) if name == "Q6_K" else slice(0, 4)  # scale, and in Q4_K also the scale of offsets
        relative = np.array([1.0] if name == "Q6_K" else [1.0, 7.5], np.float16)  # 7.5: mean of the integers
        blocks[..., halves] = relative.view(np.uint8)
        rows = blocks.reshape(len(values), -1)
        deviation = gguf.dequantize(rows, kind).std()
        blocks[..., halves] = (relative * (float(values.std()) / deviation)).astype(np.float16).view(np.uint8)
        stored[tensor] = torch.from_numpy(rows)
        plain[tensor] = torch.from_numpy(gguf.dequantize(rows, kind))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: list(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]) for name in set(of_matrices.values())}
    config["quantization_config"] = {"quant_method": "gguf", "blocks": sizes, "kinds": of_matrices}
    (folder / "config.json").write_text(json.dumps(config))
    return plain_folder
