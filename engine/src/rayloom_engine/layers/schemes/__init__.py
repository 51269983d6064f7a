"""Weight schemes: how the weights of a linear layer are stored, loaded, cut for tensor parallelism and multiplied.

A model describes each of its matrices by a LinearSpec, and the rank's SchemeFactory makes a WeightScheme from it. The
loader copies the tensors that the scheme lists, then calls `finish` once. From then on the layer calls `apply`. A
new quantised format needs a new scheme, but no change in layers and loader.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.linear_spec import LinearSpec


class WeightScheme(Protocol):
    """The weights of one linear layer, and how to multiply by them."""

    def destinations(self) -> dict[str, Destination]:
        """Returns tensor name in the checkpoint -> where to copy it, for every tensor of the layer.

        Call it before `finish`.
        """

    def finish(self) -> None:
        """Brings the loaded weights into the form that `apply` needs, such as a packed layout. Called once."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] from x [..., in], in x's type. Call it after `finish`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that only this layer uses, without the padding of a packed layout."""


class SchemeFactory(Protocol):
    """Makes the weight schemes for a checkpoint's linear layers."""

    @property
    def cut_unit(self) -> int:
        """Tensor parallelism cuts inputs and outputs at multiples of this number.

        The number is the group size, if a quantised format has groups.
        """

    def linear(self, spec: LinearSpec) -> WeightScheme:
        """Returns a scheme with memory for the weights of `spec`. The memory is not filled yet."""

    def tied(self, weight: torch.Tensor) -> WeightScheme:
        """Returns a scheme that multiplies by a model's [out, in] `weight`, such as the embedding of a tied head."""
