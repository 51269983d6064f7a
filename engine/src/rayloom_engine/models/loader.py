"""Loads weights from safetensors files into a model for torch: memory-mapped, each tensor read once.

Each tensor is copied straight to its final place. The loader for the C library is models/on_library/loader.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt
import torch
from safetensors import safe_open

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.linear_spec import TensorPart, slices_of
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.decoder_spec import checkpoint_sizes
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.quantised.gather import QuantisedTensors
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.stacked_experts import is_stacked, single_tensors
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

    Weights are rounded to `dtype`, then stored and used in the kernels' compute type. On a CPU without bfloat16
    instructions, a bfloat16 model is computed in float32. Because its weights are rounded first, they have the same
    values as in bfloat16. If the files do not fit the shape, raises ModelError with the tensors' names before any
    weight is read.
    """
    if isinstance(shape, MeasuredShape):
        from rayloom_engine.models.on_transformers.model import load_transformers_model

        whole = part or whole_part(shape.num_layers)
        made, num_bytes = load_transformers_model(folder, shape, kernels, dtype=dtype, part=whole, progress=progress)
        return LoadedModel(model=made, num_bytes_read=num_bytes)
    files = checked_files(folder, shape)
    model, destinations = empty_model(shape, part or whole_part(shape.num_layers), kernels)
    sizes = checkpoint_sizes(shape)
    wanted = (name.removesuffix(".weight") for name in destinations)
    quantised = QuantisedTensors(
        shape.scheme, ((name, (rows, columns)) for name in wanted for rows, columns in _matrix(sizes, name))
    )
    num_bytes_read = _fill(model, _Destinations(destinations, quantised), files, dtype, progress)
    model.finish()
    return LoadedModel(model=model, num_bytes_read=num_bytes_read)


@dataclass(frozen=True, slots=True)
class _Destinations:
    """Destinations of dense tensors by name. Matrices that are quantised in the checkpoint become dense."""

    by_name: dict[str, Destination]
    quantised: QuantisedTensors


def _matrix(sizes: Mapping[str, tuple[int, ...]], name: str) -> list[tuple[int, int]]:
    """Returns a list with the (outputs, inputs) of a matrix, or an empty list if the tensor is a vector."""
    size = sizes.get(f"{name}.weight", ())
    return [(size[0], size[1])] if len(size) == 2 else []


def _fill(
    model: CausalLM,
    wanted: _Destinations,
    files: list[Path],
    dtype: torch.dtype,
    progress: Progress,
) -> int:
    """Copies each tensor to its destination, and finishes the schemes. Returns the bytes read, in the files' types.

    Empties the dict of destinations. Otherwise the dict would keep the plain matrices alive next to the packed copies.
    """
    destinations = wanted.by_name
    num_bytes_read = 0
    total = sum(destination.tensor.numel() for destination in destinations.values()) * dtype.itemsize
    done = 0
    progress("load", done, total, "bytes")
    with WeightPacker(model.schemes) as packer:
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for name, tensor in _single_tensors(tensors):
                    if name in wanted.quantised:
                        stored = tensor.part(())
                        num_bytes_read += stored.nbytes
                        complete = wanted.quantised.add(name, _numbers(stored))
                        if complete is None:
                            continue
                        name = f"{complete[0]}.weight"
                        destination = destinations.pop(name)
                        stored = _part(torch.from_numpy(complete[1]), destination.part)
                    else:
                        found = destinations.pop(name, None)
                        if found is None:
                            continue
                        destination = found
                        stored = tensor.part(destination.part)
                        num_bytes_read += stored.nbytes
                    destination.tensor.copy_(_rounded(stored, destination.tensor.dtype, dtype))
                    packer.read(name)
                    done += destination.tensor.numel() * dtype.itemsize
                    progress("load", done, total, "bytes")
    return num_bytes_read


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file. `view`: the part of a tensor that stacks experts; None: the whole tensor `name`."""

    file: Any
    name: str
    view: torch.Tensor | None = None

    def part(self, part: TensorPart) -> torch.Tensor:
        """Returns the slices `part`; (): the whole tensor."""
        if self.view is not None:
            return _part(self.view, part)
        return _part(self.file.get_slice(self.name), part) if part else self.file.get_tensor(self.name)


def _single_tensors(file: Any) -> Iterator[tuple[str, _Stored]]:
    """Yields the tensors of a file by name, and each expert's part of a tensor that stacks experts."""
    for name in file.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
        if is_stacked(name):
            for single, view in single_tensors(name, file.get_tensor(name)):
                yield single, _Stored(file, name, view)
        else:
            yield name, _Stored(file, name)


def _part(stored: Any, part: TensorPart) -> torch.Tensor:
    """Returns the slices `part` of a tensor, which is in the file or in memory; (): the whole tensor."""
    if not part:
        return cast("torch.Tensor", stored[:])
    pieces: list[torch.Tensor] = [stored[slices] for slices in slices_of(part)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _numbers(stored: torch.Tensor) -> npt.NDArray[Any]:
    """Returns a tensor as a numpy array: the bits of float8 as uint8, other floats as float32."""
    if stored.dtype is torch.float8_e4m3fn:
        return stored.view(torch.uint8).numpy()
    return (stored.float() if stored.is_floating_point() else stored).numpy()


def _rounded(stored: torch.Tensor, held: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Rounds a dense tensor of the file to `dtype`. If `held` is `dtype`, the later copy rounds the tensor instead.

    Integers stay unchanged.
    """
    if stored.dtype is dtype or held is dtype or not held.is_floating_point:
        return stored
    return stored.to(dtype)
