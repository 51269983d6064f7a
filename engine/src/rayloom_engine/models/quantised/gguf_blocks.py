"""Matrices in GGUF's block formats, as the conversion of a GGUF file copies them: `weight` [N, bytes of a row].

A row is a sequence of blocks of 32 inputs, or of 256 in the K formats (ggml, ggml-common.h). Formats of 4, 5 and 8 bits
with one scale for 32 inputs are packed as they are. Q6_K, which has a scale for 16 inputs, is packed as it is, too. All
other formats are rounded to 8 bits with a scale for 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights, rounded_to_bytes, rounded_to_bytes_form
from rayloom_engine.models.quantised.reader import StoredTensor, grouped

_FORMS = {
    "Q4_0": GroupedForm(bits=4, group_size=32, zero=8),
    "Q4_1": GroupedForm(bits=4, group_size=32, zero=0, has_offsets=True),
    "Q5_0": GroupedForm(bits=8, group_size=32, zero=16),
    "Q5_1": GroupedForm(bits=8, group_size=32, zero=0, has_offsets=True),
    "Q8_0": GroupedForm(bits=8, group_size=32, zero=128),
    "Q4_K": GroupedForm(bits=4, group_size=32, zero=0, has_offsets=True, has_factors=True),
    "Q5_K": GroupedForm(bits=8, group_size=32, zero=0, has_offsets=True, has_factors=True),
    "Q6_K": GroupedForm(bits=6, group_size=16, zero=32, has_factors=True),
}
KEPT = tuple(_FORMS)  # formats that are packed as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufReader:
    """Implements MatrixReader. `kind`: a quantised type by GGUF's name, with blocks of `block_inputs` inputs."""

    kind: str
    block_inputs: int
    block_bytes: int

    @property
    def unit(self) -> int:
        return 32

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, StoredTensor]:
        row_bytes = num_inputs // self.block_inputs * self.block_bytes
        return {"weight": StoredTensor((num_outputs, row_bytes), ("U8",))}

    def form(self, num_inputs: int) -> GroupedForm:
        return _FORMS.get(self.kind, rounded_to_bytes_form())

    def packed(self, tensors: Mapping[str, Array]) -> GroupedWeights:
        if self.kind not in _FORMS:
            return rounded_to_bytes(self.plain(tensors))
        blocks_NBb = tensors["weight"].reshape(len(tensors["weight"]), -1, self.block_bytes)
        return _UNPACK[self.kind](_FORMS[self.kind], blocks_NBb)

    def plain(self, tensors: Mapping[str, Array]) -> npt.NDArray[np.float32]:
        import gguf  # imported here, because packed weights of the common kinds do not need it

        plain: npt.NDArray[np.float32] = gguf.dequantize(tensors["weight"], gguf.GGMLQuantizationType[self.kind])
        return plain


def _half(blocks: Array, at: int) -> npt.NDArray[np.float16]:
    """Returns the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _halves(packed: Array) -> npt.NDArray[np.uint8]:
    """Returns all low halves of the bytes of the last axis, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _rows(values: Array) -> Array:
    return values.reshape(len(values), -1)


def _q4(form: GroupedForm, blocks: Array) -> GroupedWeights:
    return GroupedWeights(
        form=form,
        integers_NK=_rows(_halves(blocks[..., 2 + 2 * form.has_offsets :])),
        scales_NG=_half(blocks, 0),
        offsets_NG=_half(blocks, 2) if form.has_offsets else None,
    )


def _q5(form: GroupedForm, blocks: Array) -> GroupedWeights:
    at = 2 + 2 * form.has_offsets
    fifth = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little") << 4
    return GroupedWeights(
        form=form,
        integers_NK=_rows(_halves(blocks[..., at + 4 :]) | fifth),
        scales_NG=_half(blocks, 0),
        offsets_NG=_half(blocks, 2) if form.has_offsets else None,
    )


def _q8(form: GroupedForm, blocks: Array) -> GroupedWeights:
    return GroupedWeights(form=form, integers_NK=_rows(blocks[..., 2:] ^ 128), scales_NG=_half(blocks, 0))


def _k_scales(blocks: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns scales and offsets [N, G]: 6 bits each, times two float16 numbers of a block of 256 inputs."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    scale = _half(blocks, 0).astype(np.float32)[..., None]
    minimum = _half(blocks, 2).astype(np.float32)[..., None]
    return _rows(scale * scales), _rows(-minimum * minima)


def _q4_k(form: GroupedForm, blocks: Array) -> GroupedWeights:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return grouped(form, _rows(_halves(pairs)), *_k_scales(blocks))


def _q5_k(form: GroupedForm, blocks: Array) -> GroupedWeights:
    pairs = _halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of byte j: group i, input j
    return grouped(form, _rows(pairs | bits << 4), *_k_scales(blocks))


def _q6_k(form: GroupedForm, blocks: Array) -> GroupedWeights:
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # of the weights of 128 inputs each
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    integers = low | (pairs.reshape(low.shape) & 3) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8) * _half(blocks, 208).astype(np.float32)[..., None]
    return grouped(form, _rows(integers), _rows(scales))


_UNPACK: dict[str, Callable[[GroupedForm, Array], GroupedWeights]] = {
    "Q4_0": _q4,
    "Q4_1": _q4,
    "Q5_0": _q5,
    "Q5_1": _q5,
    "Q8_0": _q8,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
