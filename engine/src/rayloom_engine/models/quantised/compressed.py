"""compressed-tensors checkpoints: `pack-quantized` (4 or 8 bits in groups), `int-quantized` (int8, a scale per output).

    weight[n, k] = weight_scale[n, g] * (q[n, k] - zero_point[n, g])

`weight_packed` [N, K / 8] has eight inputs in an int32, from the lowest bits on. Each input is stored as its value plus
8. With 8 bits, an int32 has four inputs, and each is stored as its value plus 128.
`weight_zero_point` is packed in the same way along the outputs, [N / 8, G].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights
from rayloom_engine.models.quantised.reader import StoredTensor, centred_form, grouped, library_group, nibbles


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReader:
    """Implements MatrixReader for `pack-quantized`. `group_size`: a multiple of 32; None: all inputs."""

    bits: int
    group_size: int | None
    is_symmetric: bool

    @property
    def unit(self) -> int:
        return self.group_size or 32

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        num_groups = num_inputs // (self.group_size or num_inputs)
        per_word = 32 // self.bits
        found = {
            "weight_packed": StoredTensor((num_outputs, num_inputs // per_word), ("I32",)),
            "weight_scale": StoredTensor((num_outputs, num_groups)),
        }
        if not self.is_symmetric:
            found["weight_zero_point"] = StoredTensor((-(-num_outputs // per_word), num_groups), ("I32",))
        return found

    def form(self, num_inputs: int) -> GroupedForm:
        return centred_form(self.bits, self.group_size, has_offsets=not self.is_symmetric)

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        scales_NG = tensors["weight_scale"]
        integers_NK = nibbles(tensors["weight_packed"], self.bits).reshape(len(scales_NG), -1)
        form = self.form(integers_NK.shape[1])
        if self.is_symmetric:
            return grouped(form, integers_NK, scales_NG)
        words = tensors["weight_zero_point"]
        zeros_NG = nibbles(words, self.bits).transpose(0, 2, 1).reshape(-1, words.shape[1])[: len(scales_NG)]
        return grouped(form, integers_NK, scales_NG, (form.zero - zeros_NG.astype(np.float32)) * scales_NG)

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        return self.packed(tensors).plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Reader:
    """Implements MatrixReader for `int-quantized`: int8 with one scale for an output, or for the matrix."""

    is_per_output: bool

    @property
    def unit(self) -> int:
        return 32

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((num_outputs, num_inputs), ("I8",)),
            "weight_scale": StoredTensor((num_outputs, 1) if self.is_per_output else (1,)),
        }

    def form(self, num_inputs: int) -> GroupedForm:
        return GroupedForm(bits=8, group_size=library_group(None), zero=128, has_factors=True)

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        integers_NK = tensors["weight"].view(np.uint8) ^ np.uint8(128)  # adds 128
        num_outputs, num_inputs = integers_NK.shape
        form = self.form(num_inputs)
        factors = np.broadcast_to(tensors["weight_scale"].reshape(-1), num_outputs)
        return GroupedWeights(
            form=form,
            integers_NK=integers_NK,
            scales_NG=np.ones((num_outputs, num_inputs // form.group_size), dtype=np.float16),
            factors_N=factors.copy(),
        )

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        return self.packed(tensors).plain()
