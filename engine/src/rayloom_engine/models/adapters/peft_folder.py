"""PeftFolder: the matrices of a LoRA adapter, checked against the model. Reads headers, not weights.

adapter_model.safetensors has the tensors "base_model.model.NAME.lora_A.weight" [rank, inputs] and
"base_model.model.NAME.lora_B.weight" [outputs, rank] for each matrix NAME of the model that the adapter updates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rayloom_engine.common.json_words import first_of
from rayloom_engine.core.adapter import Adapter
from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.adapters.peft_config import CONFIG, MOST_RANK, PeftConfig, read_peft_config
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.decoder_spec import decoder_spec
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import whole_part

WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<matrix>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_FLOAT_TYPES = ("BF16", "F16", "F32")
_MOST_NAMES = 3  # names in one message
_READ_BYTES = 1 << 20
_MOST_ELEMENT_BYTES = 4  # of _FLOAT_TYPES
_MOST_ENTRY_BYTES = 512  # of a tensor in a safetensors header: name, type, sizes and place
_MOST_METADATA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The update of one matrix of the checkpoint: y += scale * B (A x)."""

    a: str  # name of the tensor A [rank, inputs]
    b: str  # name of the tensor B [outputs, rank]
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """An adapter that fits the model. `updates`: name of a matrix of the model -> its update."""

    path: Path
    updates: Mapping[str, LowRank]

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def rank(self) -> int:
        """The highest rank of an update."""
        return max(update.rank for update in self.updates.values())


def read_peft_folder(folder: Path, shape: ModelShape, max_rank: int = MOST_RANK) -> PeftFolder:
    """Returns the adapter in a folder. Raises ModelError if it cannot be used with the model.

    `max_rank`: the setting max_lora_rank.
    """
    with refuses_broken(folder):
        config = read_peft_config(folder)
        path = folder / WEIGHTS
        sizes = _matrix_sizes(shape)
        found = _tensors(path, config, sizes)
        updates = {
            matrix: _update(path, config, matrix, sides, sizes[matrix]) for matrix, sides in sorted(found.items())
        }
    adapter = PeftFolder(path=folder, updates=updates)
    check_rank(folder, adapter.rank, max_rank)
    return adapter


def check_rank(folder: Path, rank: int, max_rank: int) -> None:
    """Raises ModelError if the LoRA rank is above `max_rank`, the setting max_lora_rank."""
    if rank > max_rank:
        raise ModelError(
            f"{folder}: the adapter has rank {rank}, and max_lora_rank is {max_rank}; raise max_lora_rank (at "
            f"most {MOST_RANK}), which takes memory for every adapter",
            "Unsupported",
        )


def most_weight_bytes(shape: ModelShape, max_rank: int) -> int:
    """Returns the largest possible size of the weights' file, for an adapter of LoRA rank `max_rank` and this model."""
    sizes = _matrix_sizes(shape)
    elements = max_rank * sum(num_outputs + num_inputs for num_outputs, num_inputs in sizes.values())
    # A and B of each matrix have an entry in the file's header, which may also have a few words about the file.
    return elements * _MOST_ELEMENT_BYTES + 2 * len(sizes) * _MOST_ENTRY_BYTES + _MOST_METADATA_BYTES


def adapter_of(folder: Path) -> Adapter:
    """Returns the adapter in a folder, with the digest of its two files. Reads the whole files. Raises ModelError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(name.encode() + b"\0")
                while part := file.read(_READ_BYTES):
                    digest.update(part)
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}: {error.strerror}", "NotFound") from error
    return Adapter(path=str(folder), digest=digest.digest())


@dataclass(frozen=True, slots=True)
class _AdapterTensor:
    name: str
    sizes: tuple[int, ...]
    element_type: str


def _matrix_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns name -> (outputs, inputs) of every matrix that an adapter may update."""
    spec = decoder_spec(shape, whole_part(shape.num_layers))
    linears = [linear for layer in spec.layers for linear in layer.linears]
    return {name: (rows.size, linear.inputs.size) for linear in linears for name, rows in linear.outputs.items()}


def _tensors(
    path: Path, config: PeftConfig, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, _AdapterTensor]]:
    """Returns matrix -> "A" or "B" -> tensor. Raises ModelError for tensors that belong to no matrix of the model."""
    found: dict[str, dict[str, _AdapterTensor]] = {}
    strange: list[str] = []
    try:
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                parsed = _NAME.fullmatch(name)
                if parsed is None or parsed["matrix"] not in sizes:
                    strange.append(name)
                    continue
                header = tensors.get_slice(name)
                tensor = _AdapterTensor(name, tuple(header.get_shape()), header.get_dtype())
                found.setdefault(parsed["matrix"], {})[parsed["side"]] = tensor
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; an adapter's weights must be in a file of this name") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a usable safetensors file: {error}") from error
    if strange:
        matrices = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in sizes))
        raise ModelError(
            f"{path} updates what this model does not have, or what no adapter can update: "
            f"{first_of(strange, _MOST_NAMES, word)}; works: {matrices} in the model's "
            f"{_num_layers(sizes)} layers{_made_for(config)}",
            "Unsupported",
        )
    if not found:
        raise ModelError(f"{path} has no tensors")
    return found


def _update(
    path: Path, config: PeftConfig, matrix: str, sides: Mapping[str, _AdapterTensor], sizes: tuple[int, int]
) -> LowRank:
    """Returns the update of a matrix [outputs, inputs]. Raises ModelError if A and B do not fit the matrix."""
    if len(sides) < 2:
        raise ModelError(f"{path}: {word(matrix)} has lora_{next(iter(sides))} alone; it needs lora_A and lora_B")
    a, b = sides["A"], sides["B"]
    num_outputs, num_inputs = sizes
    rank = a.sizes[0] if a.sizes else 0
    if (a.sizes, b.sizes) != ((rank, num_inputs), (num_outputs, rank)):
        raise ModelError(
            f"{path}: {word(matrix)} has A {list(a.sizes)} and B {list(b.sizes)}, and this model's matrix "
            f"[{num_outputs}, {num_inputs}] needs A [rank, {num_inputs}] and B [{num_outputs}, rank]{_made_for(config)}"
        )
    if not 1 <= rank <= MOST_RANK:
        raise ModelError(f"{path}: {word(matrix)} has rank {rank}; works: 1 to {MOST_RANK}", "Unsupported")
    if rank != config.rank_of(matrix):
        raise ModelError(f"{path}: {word(matrix)} has rank {rank}, and {CONFIG} says {config.rank_of(matrix)}")
    for tensor in (a, b):
        if tensor.element_type not in _FLOAT_TYPES:
            raise ModelError(
                f"{path}: {word(tensor.name)} has type {tensor.element_type}, works: {', '.join(_FLOAT_TYPES)}"
            )
    return LowRank(a=a.name, b=b.name, rank=rank, scale=config.scale_of(matrix, rank))


def _num_layers(sizes: Mapping[str, object]) -> int:
    return len({name.split(".")[2] for name in sizes})


def _made_for(config: PeftConfig) -> str:
    return f"; the adapter was made for {word(config.base)}" if config.base else ""
