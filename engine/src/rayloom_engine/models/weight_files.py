"""The files with a checkpoint's weights: where they are, and whether their headers fit the model.

Of the weights, only redundant tensors are read (redundant_tensors.py). Each rank checks the whole checkpoint, so that
all ranks refuse the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rayloom_engine.common.json_words import first_of
from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.config_json import is_plain_file_name, read_json, refuses_broken
from rayloom_engine.models.decoder_spec import checkpoint_sizes
from rayloom_engine.models.quantised.reader import FLOATS, StoredTensor
from rayloom_engine.models.redundant_tensors import EMBEDDING, HEAD, check_redundant
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.stacked_experts import stacked_headers

_INDEX = "model.safetensors.index.json"
_MAX_NAMES = 5  # names in one message


def checked_files(folder: Path, shape: ModelShape) -> list[Path]:
    """Returns the files with the weights of a Hugging Face folder.

    If the tensors in their headers do not fit the shape, raises ModelError with the tensors' names.
    """
    with refuses_broken(folder):
        files = weight_files(folder)
        check_redundant(folder, _check(files, checkpoint_tensors(shape), shape))
    return files


def checkpoint_tensors(shape: ModelShape) -> dict[str, StoredTensor]:
    """Returns name -> header of every tensor that the model's checkpoint must have."""
    sizes = checkpoint_sizes(shape)
    if shape.scheme is None:
        headers = {name: StoredTensor(size) for name, size in sizes.items()}
    else:
        headers = shape.scheme.tensors(sizes)
    return stacked_headers(headers) if shape.experts is not None and shape.experts.are_stacked else headers


def weight_files(folder: Path) -> list[Path]:
    """Returns the files with the weights: those that the index names, or else model.safetensors."""
    index = folder / _INDEX
    if index.exists():
        names = _names_in(index, read_json(index).get("weight_map"))
        files = [folder / name for name in names]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            missing = first_of(absent, _MAX_NAMES, word)
            raise ModelError(f"{folder}: {_INDEX} names files that are not there: {missing}; download them again")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {first_of(others, _MAX_NAMES, word)} must be converted to safetensors" if others else ""
    raise ModelError(f"{folder} has neither model.safetensors nor {_INDEX}{hint}")


def _names_in(index: Path, weight_map: object) -> list[str]:
    """Returns the files that an index names, each once.

    A name must not lead out of the model's folder. This function checks the names, not the resolved paths, because
    files in the hub library's cache are links into another folder.
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


def _check(files: list[Path], wanted: Mapping[str, StoredTensor], shape: ModelShape) -> dict[str, Path]:
    """Raises ModelError if names, sizes or types in the files' headers differ from those that the model needs.

    Returns name -> file of the tensors whose values `check_redundant` has to check.
    """
    found: dict[str, Path] = {}
    redundant: dict[str, Path] = {}
    left_over: list[str] = []
    wrong: list[str] = []
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                    stored = wanted.get(name)
                    if stored is None and _is_redundant(name, shape) and tensors.get_slice(name).get_dtype() in FLOATS:
                        redundant[name] = path
                        continue
                    if stored is None:
                        left_over += [] if _is_derived(name, shape) else [name]
                        continue
                    header = tensors.get_slice(name)
                    found[name] = path
                    wrong += _mistakes(name, header.get_shape(), header.get_dtype(), stored)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a usable safetensors file: {error}") from error
    missing = [name for name in wanted if name not in found]
    problems = [
        f"{label}: {first_of(names, _MAX_NAMES, word)}"
        for label, names in (("missing", missing), ("left over", left_over), ("wrong", wrong))
        if names
    ]
    if problems:
        raise ModelError(
            f"{files[0].parent}: the weights do not fit config.json ({shape.architecture}); " + "; ".join(problems)
        )
    return {**redundant, EMBEDDING: found[EMBEDDING]} if HEAD in redundant else redundant


def _mistakes(name: str, size: list[int], file_dtype: str, wanted: StoredTensor) -> list[str]:
    """Returns a list with one sentence about the first difference between a tensor of the file and `wanted`.

    The list is empty if there is no difference.
    """
    if (size or [1]) != list(wanted.sizes):  # a tensor of one number may lack dimensions
        return [f"{word(name)} is {size}, should be {list(wanted.sizes)}"]
    if file_dtype not in wanted.types:
        return [f"{word(name)} has type {file_dtype}, works: {', '.join(wanted.types)}"]
    return []


def _is_redundant(name: str, shape: ModelShape) -> bool:
    """Returns whether a tensor may be in a checkpoint although the model does not load it, if its values allow that."""
    stem, _, suffix = name.rpartition(".")
    is_quantised = shape.scheme is not None and shape.scheme.reader(stem) is not None
    return (name == HEAD and shape.tie_word_embeddings) or (suffix == "bias" and is_quantised)


def _is_derived(name: str, shape: ModelShape) -> bool:
    """Returns whether a checkpoint may have a tensor whatever its values are: rotary tables, scales of activations."""
    if shape.scheme is not None and name.endswith(shape.scheme.left_out):
        return True
    return name.endswith(".rotary_emb.inv_freq")
