"""AWQ checkpoints (`quant_method: awq`, `version: gemm`): integers of 4 bits with zero points.

    weight[n, k] = scales[g, n] * (q[k, n] - zeros[g, n]),  g = k // group_size

`qweight` [K, N / 8] and `qzeros` [G, N / 8] have eight outputs in an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7 from
the lowest bits on (AutoAWQ, awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights
from rayloom_engine.models.quantised.reader import StoredTensor, grouped, library_group, nibbles

ZERO = 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of output 0, 1, .. among the eight outputs of an int32


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqReader:
    """Implements MatrixReader. `group_size`: a multiple of 32."""

    group_size: int

    @property
    def unit(self) -> int:
        return self.group_size

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        num_groups = num_inputs // self.group_size
        return {
            "qweight": StoredTensor((num_inputs, num_outputs // 8), ("I32",)),
            "qzeros": StoredTensor((num_groups, num_outputs // 8), ("I32",)),
            "scales": StoredTensor((num_groups, num_outputs)),
        }

    def form(self, num_inputs: int) -> GroupedForm:
        size = library_group(self.group_size)
        return GroupedForm(bits=4, group_size=size, zero=ZERO, has_offsets=True, has_factors=True)

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        integers_NK = _outputs_first(tensors["qweight"])
        zeros_NG = _outputs_first(tensors["qzeros"]).astype(np.float32)
        scales_NG = tensors["scales"].T
        return grouped(self.form(integers_NK.shape[1]), integers_NK, scales_NG, (ZERO - zeros_NG) * scales_NG)

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        return self.packed(tensors).plain()


def _outputs_first(words: Array) -> npt.NDArray[np.uint8]:
    """Returns [N, rows] from int32 [rows, N / 8]."""
    return np.ascontiguousarray(nibbles(words)[..., _PLACES].reshape(len(words), -1).T)
