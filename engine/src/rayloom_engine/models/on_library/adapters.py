"""LibraryAdapter: a rank's part of a LoRA adapter, packed for the C library. LibraryAdapters: those in the slots.

A matrix of the rank may stack several matrices of the checkpoint (q, k, v; gate, up). It then has an update for each of
these. A is cut by the columns that the rank holds, and B by the rows. So the sum over the ranks of a stage includes
the updates.

Legend: r rank of the adapter, padded with zeros to a multiple of 16; K inputs, N outputs of the rank's part.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, address, copy_elements
from rayloom_engine.cpu_library.memory import PackedMemory
from rayloom_engine.cpu_library.structures import AdapterLayerStruct, MatrixUpdateStruct, UpdateStruct
from rayloom_engine.errors import ModelError
from rayloom_engine.layers.linear_spec import LinearSpec, StackedRows
from rayloom_engine.models.adapters.hub_adapter import check_digest
from rayloom_engine.models.adapters.memory import RANK_MULTIPLE, padded_rank
from rayloom_engine.models.adapters.peft_folder import LowRank, PeftFolder, read_peft_folder
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.decoder_spec import DecoderSpec, LayerSpec, decoder_spec
from rayloom_engine.models.on_library.matrix import WeightFormat
from rayloom_engine.models.on_library.tensor_file import TensorFile
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart


def _matrix_update(a_rK: Array, parts: Sequence[UpdateStruct]) -> MatrixUpdateStruct:
    """Returns the structure of the updates of a matrix. `a_rK`: A of all parts, packed."""
    return MatrixUpdateStruct(a=address(a_rK), parts=(UpdateStruct * 3)(*parts))


class LibraryAdapter:
    """The updates of all layers of a rank, in the structures of the library."""

    def __init__(self, folder: PeftFolder, spec: DecoderSpec, form: WeightFormat) -> None:
        """Reads the weights, and rounds them to the type of the format."""
        self._form = form
        self._folder = folder
        self._file = TensorFile(folder.weights)
        self._memory = PackedMemory()  # of this adapter alone, so that the memory is freed with the adapter
        self._arrays: list[Array] = []  # keeps alive the arrays whose addresses the structures hold
        self._layers = (AdapterLayerStruct * len(spec.layers))(*(self._layer(layer) for layer in spec.layers))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    def _layer(self, spec: LayerSpec) -> AdapterLayerStruct:
        mlp = spec.dense_mlp
        return AdapterLayerStruct(
            qkv=self._matrix(spec.qkv),
            out=self._matrix(spec.out),
            gate_up=self._matrix(mlp.gate_up),
            down=self._matrix(mlp.down),
        )

    def _matrix(self, spec: LinearSpec) -> MatrixUpdateStruct:
        """Returns the updates of a matrix of the rank. Packs the As of all parts together, then the B of each part."""
        stacked = [(rows, self._folder.updates.get(rows.name)) for rows in spec.stacked()]
        ranks = [0 if update is None else padded_rank(update.rank) for _, update in stacked]
        if not any(ranks):
            return MatrixUpdateStruct()
        a_rK = self._plain((sum(ranks), spec.num_inputs))
        columns = () if spec.inputs.is_whole else (slice(None), spec.inputs.slice)
        for (_, update), end in zip(stacked, accumulate(ranks), strict=True):
            if update is not None:
                first = end - padded_rank(update.rank)
                copy_elements(a_rK[first : first + update.rank], self._file.read(update.a, columns))
        packed = self._pack(a_rK)
        parts = [UpdateStruct() if update is None else self._part(rows, update) for rows, update in stacked]
        return _matrix_update(packed, parts)

    def _part(self, rows: StackedRows, update: LowRank) -> UpdateStruct:
        b_Nr = self._plain((rows.rows.stop - rows.rows.start, padded_rank(update.rank)))
        copy_elements(b_Nr[:, : update.rank], self._file.read(update.b, rows.bias_part))
        return UpdateStruct(b=address(self._pack(b_Nr)), scale=update.scale, rank=b_Nr.shape[1])

    def _pack(self, plain: Array) -> Array:
        packed = self._form.library.pack(plain, self._memory)
        self._arrays.append(packed)
        return packed

    def _plain(self, sizes: tuple[int, int]) -> Array:
        return np.zeros(sizes, dtype=ELEMENTS[self._form.dtype])


class UnusableAdapter:
    """Replaces an adapter that cannot be loaded.

    It makes the hidden states of tokens with this adapter NaN on all ranks of the stage and in all later stages.
    Without these NaNs, a rank would sample tokens as if the sequence had no adapter.
    """

    def __init__(self, spec: DecoderSpec, form: WeightFormat) -> None:
        self._arrays: list[Array] = []  # keeps alive the arrays whose addresses the structures hold
        self._layers = (AdapterLayerStruct * len(spec.layers))(
            *(AdapterLayerStruct(out=self._matrix(layer.out, form)) for layer in spec.layers)
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    def _matrix(self, spec: LinearSpec, form: WeightFormat) -> MatrixUpdateStruct:
        sizes = ((RANK_MULTIPLE, spec.num_inputs), (spec.num_outputs, RANK_MULTIPLE))
        a_rK, b_Nr = (form.library.pack(np.zeros(size, dtype=ELEMENTS[form.dtype])) for size in sizes)
        self._arrays += (a_rK, b_Nr)
        return _matrix_update(a_rK, [UpdateStruct(b=address(b_Nr), scale=math.nan, rank=RANK_MULTIPLE)])


class LibraryAdapters:
    """The adapters of a rank by adapter slot."""

    def __init__(self, shape: ModelShape, part: ModelPart, form: WeightFormat) -> None:
        self._shape = shape
        self._spec = decoder_spec(shape, part, form.cut_unit)
        self._form = form
        self._slots: dict[int, tuple[bytes, LibraryAdapter]] = {}  # slot -> digest, adapter
        self._unusable: dict[int, UnusableAdapter] = {}  # slot -> replacement of an adapter that could not be loaded
        self._no_adapter = (AdapterLayerStruct * len(self._spec.layers))()

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot. An adapter that another slot has is not read again.

        Raises ModelError if the adapter's files cannot be used, or have another digest. After such an error, the hidden
        states of tokens with this adapter become NaN.
        """
        loaded = dict(self._slots.values()).get(adapter.digest)
        # Frees the adapter that the slot had, before another one takes memory.
        self._slots.pop(slot, None)
        self._unusable.pop(slot, None)
        try:
            loaded = loaded or self._read(adapter)
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
        folder = check_digest(adapter)
        with refuses_broken(folder):  # the files may have changed since the digest was computed
            return LibraryAdapter(read_peft_folder(folder, self._shape), self._spec, self._form)
