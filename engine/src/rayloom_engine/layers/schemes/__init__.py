"""Weight schemes: how the weights of a linear layer are stored, loaded, cut for tensor parallelism and multiplied.

A model describes each of its matrices by a LinearSpec and lets the rank's SchemeFactory make a WeightScheme of it. The
loader copies the tensors that the scheme names, calls `finish` once, and from then on the layer calls `apply`. A
quantised format is another scheme: layers and loader stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rayloom_engine.layers.destination import Destination


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A rank's indices of one axis of a checkpoint's matrix, which has `size` of them."""

    indices: range
    size: int

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def is_whole(self) -> bool:
        return len(self.indices) == self.size

    @property
    def slice(self) -> slice:
        return slice(self.indices.start, self.indices.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A matrix of a rank: rows of one or several of the checkpoint's matrices, below each other.

    `outputs` maps the name of each matrix in the checkpoint, such as "model.layers.0.mlp.gate_proj", to this rank's
    rows of it, in the order in which they are stacked. `inputs` are the columns, the same for all of them.
    """

    outputs: Mapping[str, AxisPart]
    inputs: AxisPart
    has_bias: bool = False  # on this rank

    @property
    def num_outputs(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)


class WeightScheme(Protocol):
    """The weights of one linear layer."""

    def destinations(self) -> dict[str, Destination]:
        """Name in the checkpoint -> where to copy it, for every tensor of the layer. Only before `finish`."""

    def finish(self) -> None:
        """Brings the loaded weights into the form that `apply` wants, such as a packed layout. Called once."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out] from x [..., in], in x's type. Only after `finish`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that this layer alone owns; padding of a packed layout does not count."""


class SchemeFactory(Protocol):
    """Makes the schemes of a checkpoint's linear layers."""

    @property
    def cut_unit(self) -> int:
        """Tensor parallelism cuts inputs and outputs at multiples of this number, such as the size of a group."""

    def linear(self, spec: LinearSpec) -> WeightScheme:
        """A scheme with memory for the weights of `spec`, not filled yet."""

    def tied(self, weight: torch.Tensor) -> WeightScheme:
        """The product by a [out, in] matrix that the model owns and looks rows up in, such as a tied head's."""
