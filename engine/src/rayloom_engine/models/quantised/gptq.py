"""GPTQ checkpoints (`quant_method: gptq`): integers of 4 or 8 bits, groups of consecutive inputs.

    weight[n, k] = scales[g, n] * (q[k, n] - zeros[g, n]),  g = k // group_size

An int32 of `qweight` [K / 8, N] has eight inputs, and an int32 of `qzeros` [G, N / 8] has eight outputs, both from the
lowest bits on. With 8 bits, an int32 has four inputs or outputs. `qzeros` stores zeros - 1 in the first format, and
zeros with `checkpoint_format: gptq_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights
from rayloom_engine.models.quantised.reader import StoredTensor, centred_form, grouped, nibbles


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqReader:
    """Implements MatrixReader. `group_size`: a multiple of 32; None: all inputs."""

    bits: int
    group_size: int | None
    is_symmetric: bool  # all zero points are the middle of the range
    zero_step: int  # added to the stored zero points: 1 in the first format, else 0

    @property
    def unit(self) -> int:
        return self.group_size or 32

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        num_groups = num_inputs // (self.group_size or num_inputs)
        per_word = 32 // self.bits
        return {
            "qweight": StoredTensor((num_inputs // per_word, num_outputs), ("I32",)),
            "qzeros": StoredTensor((num_groups, num_outputs // per_word), ("I32",)),
            "scales": StoredTensor((num_groups, num_outputs)),
            "g_idx": StoredTensor((num_inputs,), ("I32",)),
        }

    def form(self, num_inputs: int) -> GroupedForm:
        return centred_form(self.bits, self.group_size, has_offsets=not self.is_symmetric)

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        scales_NG = tensors["scales"].T
        words = tensors["qweight"]
        integers_NK = nibbles(words, self.bits).transpose(1, 0, 2).reshape(words.shape[1], -1)
        num_inputs = integers_NK.shape[1]
        form = self.form(num_inputs)
        if not np.array_equal(tensors["g_idx"], np.arange(num_inputs) // (self.group_size or num_inputs)):
            raise ValueError("g_idx gives groups of inputs that are not neighbours (desc_act), which is not supported")
        stored = nibbles(tensors["qzeros"], self.bits).reshape(scales_NG.shape[1], -1).T
        zeros_NG = stored.astype(np.float32) + self.zero_step
        if self.is_symmetric:
            if not (zeros_NG == form.zero).all():
                raise ValueError(f"sym is true, and qzeros has zero points other than {form.zero}")
            return grouped(form, integers_NK, scales_NG)
        return grouped(form, integers_NK, scales_NG, (form.zero - zeros_NG) * scales_NG)

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        return self.packed(tensors).plain()
