"""Tensors in which a checkpoint stacks the matrices of all experts of a layer, as gpt-oss does. Pure.

Everywhere else in the engine each expert has matrices and biases of its own, such as
model.layers.0.mlp.experts.3.gate_proj.weight. This file translates between these tensors and those of the checkpoint.

| tensor of the checkpoint, after model.layers.0.mlp.experts. | sizes | parts |
|---|---|---|
| gate_up_proj | [E, D, 2 I] | columns of gate and up in turn: the weights of both, transposed |
| gate_up_proj_blocks, gate_up_proj_scales | [E, 2 I, ...] | rows of gate and up in turn, quantised |
| gate_up_proj_bias | [E, 2 I] | elements of gate and up in turn |
| down_proj | [E, I, D] | the weights, transposed |
| down_proj_blocks, down_proj_scales, down_proj_bias | [E, D, ...] | all of them |

Legend: E experts, D model width, I width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rayloom_engine.models.quantised.reader import StoredTensor

TensorT = TypeVar("TensorT", bound=Any)  # a numpy array or a tensor of torch

_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_PARTS = {"gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}, "down": {"down": slice(None)}}


def is_stacked(name: str) -> bool:
    """Returns whether a tensor of a checkpoint has the matrices of all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def single_tensors(name: str, stored: TensorT) -> Iterator[tuple[str, TensorT]]:
    """Yields name and view of each expert's part of a stacked tensor."""
    match = _STACKED.fullmatch(name)
    assert match is not None, name
    prefix, stack, suffix = match.groups()
    for index in range(len(stored)):
        # Weights are [inputs, outputs]; all other tensors begin with the outputs.
        of_expert = stored[index] if suffix else stored[index].T
        for part, outputs in _PARTS[stack].items():
            yield f"{prefix}.{index}.{part}_proj.{suffix or 'weight'}", of_expert[outputs]


def stacked_headers(headers: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns name -> header of every tensor of a checkpoint that stacks its experts.

    `headers`: those of the same checkpoint with a tensor for each expert.
    """
    found: dict[str, StoredTensor] = {}
    num_experts: dict[str, int] = {}
    for name, header in headers.items():
        match = _SINGLE.fullmatch(name)
        if match is None:
            found[name] = header
            continue
        prefix, index, part, suffix = match.groups()
        stack = "down" if part == "down" else "gate_up"
        stacked = f"{prefix}.{stack}_proj" + ("" if suffix == "weight" else f"_{suffix}")
        num_experts[stacked] = max(num_experts.get(stacked, 0), int(index) + 1)
        outputs, *rest = header.sizes
        sizes = (outputs * len(_PARTS[stack]), *rest)
        found[stacked] = StoredTensor(sizes[::-1] if suffix == "weight" else sizes, header.types)
    for name, count in num_experts.items():
        found[name] = StoredTensor((count, *found[name].sizes), found[name].types)
    return found
