"""fp8 checkpoints: a weight is a float8_e4m3fn number times a scale of its matrix, its output or its block.

The C library has no kernels for fp8 weights, so `packed` quantises them to int8, with a scale for every 32 weights. The
integers have steps of 1/127 of the largest of these 32 weights. Near this largest weight, the steps of fp8 are 1/14 of
the weight. `plain` returns the exact weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights, rounded_to_bytes, rounded_to_bytes_form
from rayloom_engine.models.quantised.reader import StoredTensor


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Returns the value of each byte: a sign, 4 bits of exponent with a bias of 7, 3 bits of fraction; no infinity."""
    bits = np.arange(128)
    exponent, fraction = bits >> 3, bits & 7
    values = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan
    both: npt.NDArray[np.float32] = np.concatenate([values, -values]).astype(np.float32)
    return both


E4M3 = _e4m3_values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Reader:
    """Implements MatrixReader. `block`: rows and columns that share a scale, if `kind` is "block"."""

    scale: str  # suffix of the scales' tensor
    kind: str  # "tensor", "channel" or "block"
    block: tuple[int, int] = (1, 1)

    @property
    def unit(self) -> int:
        return 32

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        sizes: tuple[int, ...] = (1,)
        if self.kind == "channel":
            sizes = (num_outputs, 1)
        elif self.kind == "block":
            sizes = (-(-num_outputs // self.block[0]), -(-num_inputs // self.block[1]))
        return {
            "weight": StoredTensor((num_outputs, num_inputs), ("F8_E4M3",)),
            self.scale: StoredTensor(sizes),
        }

    def form(self, num_inputs: int) -> GroupedForm:
        return rounded_to_bytes_form()

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        return rounded_to_bytes(self.plain(tensors))

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        plain_NK: npt.NDArray[np.float32] = E4M3[tensors["weight"]]
        scales = tensors[self.scale]
        if self.kind == "block":
            scales = scales.repeat(self.block[0], axis=0).repeat(self.block[1], axis=1)
            scales = scales[: plain_NK.shape[0], : plain_NK.shape[1]]
        plain_NK *= scales
        return plain_NK
