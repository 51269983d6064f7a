"""Tensors of published models, as transformers makes them on the meta device from their config.json.

tensors.json has the tensors of all models in tools/published_models.py that the engine can serve. transformers needs a
minute to make the models, so tests read the file instead. `*` in a name stands for the number of a layer.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "tensors.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    sizes: tuple[int, ...]
    style: str  # how transformers' own tensor-parallel plan cuts the tensor; empty: every rank has all of it
    first: int | None = None  # first layer that has such a tensor; None: the tensor belongs to no layer
    last: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def module(self) -> str:
        """The last part of the name, without weight or bias, such as q_proj."""
        return self.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]

    @property
    def num_weights(self) -> int:
        """The number of weights in all layers that have the tensor."""
        return self.numel if self.first is None or self.last is None else self.numel * (self.last - self.first + 1)


def meta_tensors(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Returns the tensors of the model with this configuration. Shared tensors appear once.

    The model has dense weights, even if there is a `quantization_config`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        dense = {key: value for key, value in config.items() if key != "quantization_config"}
        (Path(folder) / "config.json").write_text(json.dumps(dense), encoding="utf-8")
        read = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read)
    model.tie_weights()
    weights = ((name, tuple(weight.shape)) for name, weight in model.named_parameters())
    return _by_layers(weights, model.tp_plan or {})


def _by_layers(weights: Iterable[tuple[str, tuple[int, ...]]], plan: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Returns one Tensor for each run of layers whose weights have equal names and sizes.

    `plan`: name of a module or a tensor, with * for the number of a layer -> style.
    """

    def style(name: str) -> str:
        return plan.get(name) or plan.get(name.removesuffix(".weight").removesuffix(".bias")) or ""

    of_layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    found = []
    for name, sizes in weights:
        layer = _LAYER.search(name)
        if layer is None:
            found.append(Tensor(name, sizes, style(name)))
        else:
            of_layers.setdefault((_LAYER.sub("layers.*.", name), sizes), []).append(int(layer[1]))
    for (name, sizes), numbers in of_layers.items():
        starts = [number for number in numbers if number - 1 not in numbers]
        ends = [number for number in numbers if number + 1 not in numbers]
        found += [Tensor(name, sizes, style(name), first, last) for first, last in zip(starts, ends, strict=True)]
    return tuple(found)


def read_tensors() -> dict[str, tuple[Tensor, ...]]:
    """Returns name of a model -> its tensors, from tensors.json."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    of_names = {name: document[found] if isinstance(found, str) else found for name, found in document.items()}
    return {name: tuple(map(_tensor, found)) for name, found in of_names.items()}


def tensors_text(tensors: Mapping[str, tuple[Tensor, ...]]) -> str:
    """Returns the text of tensors.json.

    If a model has the same tensors as an earlier model, its entry is only the name of that model.
    """
    names: dict[tuple[Tensor, ...], str] = {}
    lines = []
    for name, found in tensors.items():
        same = names.setdefault(found, name)
        value = same if same != name else list(map(_entry, found))
        lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(tensor: Tensor) -> list[Any]:
    layers = [] if tensor.first is None else [tensor.first, tensor.last]
    return [tensor.name, list(tensor.sizes), tensor.style, *layers]


def _tensor(entry: list[Any]) -> Tensor:
    name, sizes, style, *layers = entry
    return Tensor(name, tuple(sizes), style, *layers)
