"""Loads weights from safetensors files into a model: memory-mapped, each tensor read once, straight to its final place.

Each rank checks the headers of the whole checkpoint, so that all ranks refuse the same checkpoints. Then it reads only
the tensors of its stage and shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rayloom_engine.config import Quantization
from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.kernels.kernel_set import KernelSet, choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.schemes.int8 import Int8Schemes
from rayloom_engine.models.checkpoint.config_json import is_plain_file_name, read_json, refuses_broken
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.cpu_decoder import CpuDecoder
from rayloom_engine.models.decoder import CausalLM, DecoderWeights
from rayloom_engine.models.empty import empty_model, empty_weights
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.weight_packer import WeightPacker
from rayloom_engine.parallel.model_part import ModelPart, whole_part

_INDEX = "model.safetensors.index.json"
_MAX_NAMES = 5  # names in one message


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
    quantization: Quantization = "none",
    part: ModelPart | None = None,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Returns a rank's part of the model in a Hugging Face folder, ready to run; without `part`, the whole model.

    Weights are rounded to `dtype`, then stored and used in the kernels' compute type. The two types differ on a CPU
    without bfloat16 instructions and without the C library: a bfloat16 model is then served in float32. Rounding first
    gives the results of the bfloat16 model. `quantization` comes after rounding; int8 needs the C library. If the files
    do not fit the shape, raises ModelError with the tensors' names before reading any weight.
    """
    with refuses_broken(folder):
        files = _weight_files(folder)
        _check(files, _whole_destinations(shape), shape)
    part = part or whole_part(shape.num_layers)
    schemes = Int8Schemes(kernels.linear, kernels.target) if quantization == "int8" else None
    weights, destinations = empty_weights(shape, part, kernels, schemes)
    num_bytes_read = _fill(weights, destinations, files, dtype, progress)
    decoder = CausalLM if kernels.target.library is None else CpuDecoder
    model: RankModel = decoder(shape, part, kernels, weights)
    return LoadedModel(model=model, num_bytes_read=num_bytes_read)


def _fill(
    weights: DecoderWeights,
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
    with WeightPacker(weights.schemes) as packer:
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


def _whole_destinations(shape: ModelShape) -> dict[str, Destination]:
    """Returns the destinations of all tensors of the checkpoint, without allocating memory for them."""
    target = Target(device=torch.device("meta"), compute_dtype=torch.float32)
    _, destinations = empty_model(shape, whole_part(shape.num_layers), choose_kernels(target))
    return destinations


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files with the weights: those that the index names, or else model.safetensors."""
    index = folder / _INDEX
    if index.exists():
        names = _names_in(index, read_json(index).get("weight_map"))
        files = [folder / name for name in names]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise ModelError(f"{folder}: {_INDEX} names files that are not there: {_list(absent)}; download them again")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {_list(others)} must be converted to safetensors" if others else ""
    raise ModelError(f"{folder} has neither model.safetensors nor {_INDEX}{hint}")


def _names_in(index: Path, weight_map: object) -> list[str]:
    """Returns the files that an index names, each once.

    A name must not lead out of the model's folder. This checks the names, not the resolved paths, because files in the
    hub library's cache are links into another folder.
    """
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be an object, tensor name -> file name")
    for tensor, name in weight_map.items():
        if not is_plain_file_name(name, ".safetensors"):
            raise ModelError(
                f"{index}: weight_map says that {word(tensor)} is in {shown(name)}; works: the plain name of a file in "
                "the model's folder that ends in .safetensors"
            )
    return sorted(set(weight_map.values()))


def _check(files: list[Path], wanted: Mapping[str, Destination], shape: ModelShape) -> None:
    """Compares the tensors' names, sizes and types in the files' headers with what the model needs."""
    found: set[str] = set()
    left_over: list[str] = []
    wrong: list[str] = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                    destination = wanted.get(name)
                    if destination is None:
                        left_over += [] if _is_derived(name, shape) else [name]
                        continue
                    header = tensors.get_slice(name)
                    found.add(name)
                    wrong += _mistakes(name, header.get_shape(), header.get_dtype(), destination)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a usable safetensors file: {error}") from error
    missing = [name for name in wanted if name not in found]
    problems = [
        f"{label}: {_list(names)}"
        for label, names in (("missing", missing), ("left over", left_over), ("wrong", wrong))
        if names
    ]
    if problems:
        raise ModelError(
            f"{files[0].parent}: the weights do not fit config.json ({shape.architecture}); " + "; ".join(problems)
        )


def _mistakes(name: str, size: list[int], file_dtype: str, wanted: Destination) -> list[str]:
    """Returns the first difference between a tensor of the file and its destination, as a sentence.

    Empty if they match.
    """
    wanted_size = list(wanted.tensor.shape)
    if size != wanted_size:
        return [f"{word(name)} is {size}, should be {wanted_size}"]
    if file_dtype not in wanted.file_dtypes:
        return [f"{word(name)} has type {file_dtype}, works: {', '.join(wanted.file_dtypes)}"]
    return []


def _is_derived(name: str, shape: ModelShape) -> bool:
    """Returns whether a tensor that the model does not load may still be in a checkpoint: the copy of a tied head,
    rotary tables.
    """
    return (name == "lm_head.weight" and shape.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def _list(names: Iterable[str]) -> str:
    names = [word(name) for name in names]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
