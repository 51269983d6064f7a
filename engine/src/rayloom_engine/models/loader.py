"""Weights from safetensors files into a model: memory-mapped, each tensor read once, straight to its final place.

A rank checks the headers of the whole checkpoint, so all ranks refuse the same one, and reads what its stage and shard
need of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.kernels.linear import choose_linear_method
from rayloom_engine.models.checkpoint.config_json import is_plain_file_name, read_json, refuses_broken
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.empty import Destination, empty_model
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import Stage, whole_model

_FILE_DTYPES = ("BF16", "F16", "F32")
_INDEX = "model.safetensors.index.json"
_MAX_NAMES = 5  # in a message


def load_model(
    folder: Path,
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    stage: Stage | None = None,
    shard: Shard = WHOLE,
    progress: Progress = no_progress,
) -> CausalLM:
    """A stage of the model in a Hugging Face folder, or a shard of it, ready to run. Without `stage`, all layers.

    Weights are rounded to `dtype`, then held and computed in `compute_dtype` (a CPU without bfloat16 instructions
    serves a bfloat16 model in float32: rounding first keeps the results those of the bfloat16 model). Raises
    ModelError before any weight is read when the files are not what the shape asks for, naming the tensors.
    """
    with refuses_broken(folder):
        files = _weight_files(folder)
        _check(files, _expected_sizes(shape), shape)
    stage = stage or whole_model(shape.num_layers)
    model, destinations = empty_model(shape, stage, shard, device=device, compute_dtype=compute_dtype)
    model.num_bytes_read = _fill(destinations, files, dtype, progress)
    destinations.clear()  # otherwise every plain matrix would live on beside its packed form
    model.pack(choose_linear_method(device, compute_dtype))
    return model


def _fill(destinations: dict[str, Destination], files: list[Path], dtype: torch.dtype, progress: Progress) -> int:
    """Copies every destination's tensor into it. Returns the bytes that were read, in the files' types."""
    num_bytes_read = 0
    total = sum(destination.tensor.numel() for destination in destinations.values()) * dtype.itemsize
    done = 0
    progress("load", done, total, "bytes")
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                destination = destinations.get(name)
                if destination is None:
                    continue
                part = destination.part
                stored = tensors.get_slice(name)[part] if part else tensors.get_tensor(name)
                num_bytes_read += stored.nbytes
                rounds_on_copy = stored.dtype is dtype or destination.tensor.dtype is dtype
                destination.tensor.copy_(stored if rounds_on_copy else stored.to(dtype))
                done += destination.tensor.numel() * dtype.itemsize
                progress("load", done, total, "bytes")
    return num_bytes_read


def _expected_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    stage = whole_model(shape.num_layers)
    _, destinations = empty_model(shape, stage, WHOLE, device=torch.device("meta"), compute_dtype=torch.float32)
    return {name: tuple(destination.tensor.shape) for name, destination in destinations.items()}


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, or all of the folder."""
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
    """The files that an index names, each once.

    A name must not lead out of the model's folder. The names are checked and not where they lead, because the files of
    the hub library's cache are links to another folder.
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


def _check(files: list[Path], sizes: dict[str, tuple[int, ...]], shape: ModelShape) -> None:
    """Compares names, sizes and types in the files' headers with what the model needs."""
    found: set[str] = set()
    left_over: list[str] = []
    wrong: list[str] = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                    if name not in sizes:
                        left_over += [] if _is_derived(name, shape) else [name]
                        continue
                    header = tensors.get_slice(name)
                    found.add(name)
                    if tuple(header.get_shape()) != sizes[name]:
                        wrong.append(f"{word(name)} is {list(header.get_shape())}, should be {list(sizes[name])}")
                    elif header.get_dtype() not in _FILE_DTYPES:
                        wrong.append(f"{word(name)} has type {header.get_dtype()}, works: {', '.join(_FILE_DTYPES)}")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a usable safetensors file: {error}") from error
    missing = [name for name in sizes if name not in found]
    problems = [
        f"{label}: {_list(names)}"
        for label, names in (("missing", missing), ("left over", left_over), ("wrong", wrong))
        if names
    ]
    if problems:
        raise ModelError(
            f"{files[0].parent}: the weights do not fit config.json ({shape.architecture}); " + "; ".join(problems)
        )


def _is_derived(name: str, shape: ModelShape) -> bool:
    """Tensors that some checkpoints hold although they follow from others: a tied head, old rotary tables."""
    return (name == "lm_head.weight" and shape.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def _list(names: Iterable[str]) -> str:
    names = [word(name) for name in names]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
