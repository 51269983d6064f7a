"""The decoder on the C library. A call computes all layers of a step, or one half layer if ranks must sum its output.

The residual stream is float32 from the embedding to the final norm, also between pipeline stages. Every sum has a fixed
order. So a token's logits do not depend on the other tokens of the step, or on the way in which a prompt was cut into
steps.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary, h half of the head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType, address, rounded
from rayloom_engine.cpu_library.structures import BatchStruct, LinearStruct
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.given_rows import GivenRows
from rayloom_engine.models.on_library.adapters import LibraryAdapters
from rayloom_engine.models.on_library.rotary_table import RotaryTable
from rayloom_engine.models.on_library.weights import LibraryWeights, PlainWeights
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup

BLOCK_SIZE = 16  # positions of a KV block, as in kv_layout.h
# the type of the residual stream, and of the hidden states that a stage sends to the next stage
HIDDEN_TYPE: ElementType = "float32"
_ONE_RANK = OneRank()

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class LibraryDecoder:
    """One stage of a decoder, or a shard of it. Made by `models.on_library.loader.load_decoder`."""

    def __init__(self, shape: ModelShape, part: ModelPart, weights: PlainWeights) -> None:
        """`weights`: their tensors are loaded, and their matrices finished."""
        form = weights.form
        self.shape = shape
        self.part = part
        self.library = form.library
        self.quantization = form.label
        self.dtype: ElementType = form.dtype  # of keys and values, and of the weights unless they are quantised
        self._weights = LibraryWeights(weights, shape)
        self.weight_bytes = self._weights.num_bytes
        self.cut_unit = form.cut_unit  # tensor parallelism cuts the feed-forward part at multiples of this number
        self._adapters = LibraryAdapters(shape, part, form)
        self._rotary = RotaryTable(shape.rope, shape.head_dim)
        window_rope = shape.traits.window_rope
        self._window_rotary = None if window_rope is None else RotaryTable(window_rope, shape.head_dim)
        self._halves = range(2 * len(part.stage.layers))
        # The scale is rounded to the weights' type, because training uses a scale of this type.
        self._embedding_scale = rounded(shape.traits.embedding_scale, form.dtype)
        self._progress = ctypes.c_int64(0)
        # The cache, and the addresses of its layers.
        self._addresses: tuple[LibraryPages, ctypes.Array[ctypes.c_void_p]] | None = None

    @property
    def kv_layout(self) -> KvLayout:
        """Sizes of the KV cache that `forward` needs."""
        return KvLayout(
            num_layers=len(self.part.stage.layers),
            num_kv_heads=len(self.part.shard.kv_heads(self.shape.num_kv_heads)),
            head_dim=self.shape.head_dim,
        )

    @property
    def progress(self) -> int:
        """Half layers that `forward` has computed so far. Any thread may read it while `forward` runs."""
        return self._progress.value

    def load_adapter(self, load: AdapterLoad) -> None:
        """Loads a LoRA adapter into an adapter slot, as LibraryAdapters.load does."""
        self._adapters.load(load.slot, load.adapter)

    def forward(
        self,
        inputs: npt.NDArray[Any],
        positions_T: IntArray,
        batch: PagedBatch,
        cache: LibraryPages,
        group: TensorGroup[FloatArray] = _ONE_RANK,
        wanted_rows: Sequence[int] | None = None,
        given: GivenRows[FloatArray] | None = None,
    ) -> Array:
        """Returns hidden states [T, D], as `models.model.RankModel.forward` does, but in numpy arrays.

        The last stage returns them in the operand type of the head, and earlier stages return the residual stream in
        float32. The embeddings in `given` are not rounded.
        """
        pages = cache.pages[0]
        assert (pages.shape[1], pages.dtype) == (BLOCK_SIZE, ELEMENTS[self.dtype]), (pages.shape, pages.dtype)
        weights = self._weights
        residual_TD = inputs if weights.embedding is None else self._embed(inputs, weights.embedding, group, given)
        # The next stage needs all rows.
        wanted = None if wanted_rows is None or weights.final_norm_D is None else np.array(wanted_rows, dtype=np.int64)
        self._compute_layers(residual_TD, positions_T, batch, cache, group, wanted)
        if weights.final_norm_D is None:
            return residual_TD
        return self.library.normalise(self.dtype, residual_TD, weights.final_norm_D, self.shape.rms_norm_eps)

    def logits(self, hidden_ND: Array) -> FloatArray:
        """Returns float32 logits [N, V] of N rows of `forward`'s result. Only the last stage computes logits.

        V: the part of the vocabulary that this rank computes.
        """
        head = self._weights.head
        assert head is not None, f"stage {self.part.stage.index} has no head"
        logits_NV = self.library.multiply(self.dtype, head, hidden_ND)
        traits = self.shape.traits
        if traits.logit_scale != 1.0:
            logits_NV *= np.float32(traits.logit_scale)
        if traits.logit_cap is not None:
            logits_NV /= np.float32(traits.logit_cap)
            np.tanh(logits_NV, out=logits_NV)
            logits_NV *= np.float32(traits.logit_cap)
        return logits_NV

    def _compute_layers(
        self,
        residual_TD: FloatArray,
        positions_T: IntArray,
        batch: PagedBatch,
        cache: LibraryPages,
        group: TensorGroup[FloatArray],
        wanted_N: IntArray | None,
    ) -> None:
        """Adds the outputs of all layers to the residual stream in place. `wanted_N`: as `wanted_rows` of `forward`."""
        num_sequences = len(batch.query_lens)
        longest = max(batch.context_lens)
        cosines_Th, sines_Th = self._rotary.rows(positions_T, longest)
        window_tables = (cosines_Th, sines_Th)
        if self._window_rotary is not None:
            window_tables = self._window_rotary.rows(positions_T, longest)
        query_lens = (ctypes.c_int64 * num_sequences)(*batch.query_lens)
        context_lens = (ctypes.c_int64 * num_sequences)(*batch.context_lens)
        block_tables_SB = np.ascontiguousarray(batch.block_tables_SB)
        pages = self._addresses_of(cache)
        adapters_T = batch.adapters_T
        adapters = None if adapters_T is None else self._adapters.table(int(adapters_T.max()) + 1)
        # The structure has addresses of these arrays, which live at least until this function returns.
        step = BatchStruct(
            num_tokens=residual_TD.shape[0],
            num_sequences=num_sequences,
            query_lens=ctypes.addressof(query_lens),
            context_lens=ctypes.addressof(context_lens),
            block_tables=address(block_tables_SB),
            table_width=block_tables_SB.shape[1],
            slot_mapping=address(batch.slot_mapping_T),
            cosines=address(cosines_Th),
            sines=address(sines_Th),
            window_cosines=address(window_tables[0]),
            window_sines=address(window_tables[1]),
            pages=ctypes.addressof(pages),
            residual=address(residual_TD),
            wanted_rows=None if wanted_N is None else wanted_N.ctypes.data,  # `address` refuses an empty array
            num_wanted=0 if wanted_N is None else len(wanted_N),
            adapters=None if adapters is None else ctypes.addressof(adapters),
            adapter_of_token=None if adapters_T is None else address(adapters_T),
        )
        decoder = self._weights.decoder
        if self.part.shard.count == 1:
            self.library.forward(decoder, step, self._halves, self._progress)
            return
        for half in self._halves:
            partial_TD = np.empty_like(residual_TD)
            self.library.forward(decoder, step, range(half, half + 1), self._progress, partial_TD)
            layer = decoder.layers[half // 2]
            norm = layer.mlp_output_norm if half % 2 else layer.attention_output_norm
            self.library.add(residual_TD, group.all_reduce(partial_TD), decoder, norm)

    def _addresses_of(self, cache: LibraryPages) -> ctypes.Array[ctypes.c_void_p]:
        """Returns the addresses of the cache's layers. A rank has one cache, so the addresses are collected once."""
        if self._addresses is None or self._addresses[0] is not cache:
            addresses = (ctypes.c_void_p * len(cache.pages))(*(address(layer) for layer in cache.pages))
            self._addresses = (cache, addresses)
        return self._addresses[1]

    def _embed(
        self,
        token_ids_T: IntArray,
        embedding: LinearStruct,
        group: TensorGroup[FloatArray],
        given: GivenRows[FloatArray] | None,
    ) -> FloatArray:
        traits = self.shape.traits
        rows_TD = self._rows(token_ids_T, embedding, group)
        if given is not None and not traits.has_scaled_embeds:
            rows_TD[given.rows_G] = given.embeds_GD
        if traits.embedding_scale != 1.0:
            rows_TD *= self._embedding_scale
        if given is not None and traits.has_scaled_embeds:
            rows_TD[given.rows_G] = given.embeds_GD
        return rows_TD

    def _rows(self, token_ids_T: IntArray, embedding: LinearStruct, group: TensorGroup[FloatArray]) -> FloatArray:
        shard = self.part.shard
        if shard.count == 1:
            return self.library.embed(self.dtype, embedding, token_ids_T)
        # Only one rank has the row of a given token; the others add zeros.
        rows_T = token_ids_T - shard.part(self.shape.vocab_size).start
        rows_T[(rows_T < 0) | (rows_T >= embedding.num_outputs)] = -1
        return group.all_reduce(self.library.embed(self.dtype, embedding, rows_T))
