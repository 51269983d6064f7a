"""LibraryAdapter: a rank's part of a LoRA adapter, packed for the C library. LibraryAdapters: those in adapter slots.

A matrix of the rank that stacks several of the checkpoint's (q, k, v; gate, up) has an update for each of them. A is
cut by the columns and B by the rows that the rank holds. So the ranks of a stage sum updates as they sum products.

Legend: r rank of the adapter, padded with zeros to a multiple of 16; K inputs, N outputs of the rank's part.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, address, copy_elements
from rayloom_engine.cpu_library.memory import PackedMemory
from rayloom_engine.cpu_library.structures import AdapterLayerStruct, UpdateStruct
from rayloom_engine.errors import ModelError
from rayloom_engine.layers.linear_spec import LinearSpec, StackedRows
from rayloom_engine.models.adapters.peft_folder import LowRank, PeftFolder, adapter_of, read_peft_folder
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.decoder_spec import DecoderSpec, LayerSpec, decoder_spec
from rayloom_engine.models.on_library.matrix import WeightFormat
from rayloom_engine.models.on_library.tensor_file import TensorFile
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart

_RANK_UNIT = 16  # the library's products have a multiple of 16 inputs and outputs


class LibraryAdapter:
    """The updates of all layers of a rank, in the structures of the library."""

    def __init__(self, folder: PeftFolder, spec: DecoderSpec, form: WeightFormat) -> None:
        """Reads the weights, and rounds them to the type of the format."""
        self._form = form
        self._folder = folder
        self._file = TensorFile(folder.weights)
        self._memory = PackedMemory()  # of its own, so that it is freed with the adapter
        self._arrays: list[Array] = []  # those whose addresses the structures hold
        self._layers = (AdapterLayerStruct * len(spec.layers))(*(self._layer(layer) for layer in spec.layers))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    def _layer(self, spec: LayerSpec) -> AdapterLayerStruct:
        q, k, v = self._updates(spec.qkv)
        gate, up = self._updates(spec.dense_mlp.gate_up)
        (out,) = self._updates(spec.out)
        (down,) = self._updates(spec.dense_mlp.down)
        return AdapterLayerStruct(q=q, k=k, v=v, out=out, gate=gate, up=up, down=down)

    def _updates(self, spec: LinearSpec) -> list[UpdateStruct]:
        """Returns the update of each matrix of the checkpoint in a matrix of the rank, in stacking order."""
        found = []
        for stacked in spec.stacked():
            update = self._folder.updates.get(stacked.name)
            found.append(UpdateStruct() if update is None else self._update(spec, stacked, update))
        return found

    def _update(self, spec: LinearSpec, stacked: StackedRows, update: LowRank) -> UpdateStruct:
        rank = -(-update.rank // _RANK_UNIT) * _RANK_UNIT
        num_outputs = stacked.rows.stop - stacked.rows.start
        a_rK = self._plain((rank, spec.num_inputs))
        columns = () if spec.inputs.is_whole else (slice(None), spec.inputs.slice)
        copy_elements(a_rK[: update.rank], self._file.read(update.a, columns))
        b_Nr = self._plain((num_outputs, rank))
        copy_elements(b_Nr[:, : update.rank], self._file.read(update.b, stacked.bias_part))
        packed = [self._form.library.pack(matrix, self._memory) for matrix in (a_rK, b_Nr)]
        self._arrays += packed
        return UpdateStruct(a=address(packed[0]), b=address(packed[1]), scale=update.scale, rank=rank)

    def _plain(self, sizes: tuple[int, int]) -> Array:
        return np.zeros(sizes, dtype=ELEMENTS[self._form.dtype])


class UnusableAdapter:
    """Stands for an adapter that cannot be loaded. Its tokens become NaN on all ranks of the stage and in all later
    stages, so no rank takes them for tokens of the plain model.
    """

    def __init__(self, spec: DecoderSpec, form: WeightFormat) -> None:
        self._arrays: list[Array] = []  # those whose addresses the structures hold
        self._layers = (AdapterLayerStruct * len(spec.layers))(
            *(AdapterLayerStruct(out=self._update(layer.out, form)) for layer in spec.layers)
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    def _update(self, spec: LinearSpec, form: WeightFormat) -> UpdateStruct:
        sizes = ((_RANK_UNIT, spec.num_inputs), (spec.num_outputs, _RANK_UNIT))
        packed = [form.library.pack(np.zeros(size, dtype=ELEMENTS[form.dtype])) for size in sizes]
        self._arrays += packed
        return UpdateStruct(a=address(packed[0]), b=address(packed[1]), scale=math.nan, rank=_RANK_UNIT)


class LibraryAdapters:
    """The adapters of a rank by adapter slot."""

    def __init__(self, shape: ModelShape, part: ModelPart, form: WeightFormat) -> None:
        self._shape = shape
        self._spec = decoder_spec(shape, part, form.cut_unit)
        self._form = form
        self._slots: dict[int, tuple[bytes, LibraryAdapter]] = {}  # slot -> digest, adapter
        self._unusable: dict[int, UnusableAdapter] = {}  # slot -> in place of an adapter that could not be loaded
        self._no_adapter = (AdapterLayerStruct * len(self._spec.layers))()

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot. One that another slot has is not read again.

        Raises ModelError if its files cannot be used, or are not those of the digest. Its tokens become NaN then.
        """
        known = dict(self._slots.values())
        self._slots.pop(slot, None)
        self._unusable.pop(slot, None)
        try:
            loaded = known.get(adapter.digest) or self._read(adapter)
        except ModelError:
            self._unusable[slot] = UnusableAdapter(self._spec, self._form)
            raise
        self._slots[slot] = (adapter.digest, loaded)

    def table(self, count: int) -> ctypes.Array[ctypes.c_void_p]:
        """Returns the addresses of the adapters in the first `count` slots. An empty slot updates nothing."""
        return (ctypes.c_void_p * count)(*(self._address(slot) for slot in range(count)))

    def _address(self, slot: int) -> int:
        if slot in self._slots:
            return self._slots[slot][1].address
        if slot in self._unusable:
            return self._unusable[slot].address
        return ctypes.addressof(self._no_adapter)

    def _read(self, adapter: Adapter) -> LibraryAdapter:
        folder = Path(adapter.path)
        if adapter_of(folder).digest != adapter.digest:
            raise ModelError(f"{folder}: the files of the adapter have changed since it was loaded; load it again")
        with refuses_broken(folder):  # files that change meanwhile
            return LibraryAdapter(read_peft_folder(folder, self._shape), self._spec, self._form)
