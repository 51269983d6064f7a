"""Loads weights from safetensors files into a model for torch: memory-mapped, each tensor read once, straight to its
final place. The loader for the C library is models/on_library/loader.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.layers.destination import Destination
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.weight_files import checked_files
from rayloom_engine.models.weight_packer import WeightPacker
from rayloom_engine.parallel.model_part import ModelPart, whole_part


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights in place."""

    model: RankModel
    num_bytes_read: int  # bytes of weights read from files, in the files' types


def load_model(
    folder: Path,
    shape: ModelShape,
    kernels: KernelSet,
    *,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Returns a rank's part of the model in a Hugging Face folder, ready to run; without `part`, the whole model.

    Weights are rounded to `dtype`, then stored and used in the kernels' compute type. The two types differ on a CPU
    without bfloat16 instructions: a bfloat16 model is then served in float32. Rounding first gives the results of the
    bfloat16 model. If the files do not fit the shape, raises ModelError with the tensors' names before reading any
    weight.
    """
    if isinstance(shape, MeasuredShape):
        from rayloom_engine.models.on_transformers.model import load_transformers_model

        whole = part or whole_part(shape.num_layers)
        made, num_bytes = load_transformers_model(folder, shape, kernels, dtype=dtype, part=whole, progress=progress)
        return LoadedModel(model=made, num_bytes_read=num_bytes)
    files = checked_files(folder, shape)
    model, destinations = empty_model(shape, part or whole_part(shape.num_layers), kernels)
    num_bytes_read = _fill(model, destinations, files, dtype, progress)
    return LoadedModel(model=model, num_bytes_read=num_bytes_read)


def _fill(
    model: CausalLM,
    destinations: dict[str, Destination],
    files: list[Path],
    dtype: torch.dtype,
    progress: Progress,
) -> int:
    """Copies each tensor to its destination, and finishes the schemes. Returns the bytes read, in the files' types.

    Empties `destinations`, which would keep the plain matrices alive next to their packed copies.
    """
    num_bytes_read = 0
    total = sum(destination.tensor.numel() for destination in destinations.values()) * dtype.itemsize
    done = 0
    progress("load", done, total, "bytes")
    with WeightPacker(model.schemes) as packer:
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                    destination = destinations.pop(name, None)
                    if destination is None:
                        continue
                    part = destination.part
                    stored = tensors.get_slice(name)[part] if part else tensors.get_tensor(name)
                    num_bytes_read += stored.nbytes
                    destination.tensor.copy_(_rounded(stored, destination.tensor.dtype, dtype))
                    packer.read(name)
                    done += destination.tensor.numel() * dtype.itemsize
                    progress("load", done, total, "bytes")
    return num_bytes_read


def _rounded(stored: torch.Tensor, held: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Rounds a dense tensor of the file to `dtype`, unless the copy to type `held` rounds it as well.

    Integers stay unchanged.
    """
    if stored.dtype is dtype or held is dtype or not held.is_floating_point:
        return stored
    return stored.to(dtype)
