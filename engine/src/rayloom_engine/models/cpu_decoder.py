"""The decoder on the C library: one call computes all layers of a step, or half a layer if ranks must sum in between.

The residual stream is float32 from the embedding to the final norm, also between pipeline stages. Every sum has a fixed
order, so a token's logits depend neither on the other tokens of the step nor on how a prompt was cut into steps.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary, h half of the head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.cpu_library.structures import BatchStruct, LinearStruct
from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kv.cache import KvLayout, KvPages
from rayloom_engine.models.cpu_weights import CpuWeights
from rayloom_engine.models.decoder import DecoderWeights, kv_layout_of
from rayloom_engine.models.rope import RotaryTable
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup

BLOCK_SIZE = 16  # positions of a KV block, as in kv_layout.h
_ONE_RANK = OneRank()


class CpuDecoder:
    """Implements RankModel, for one stage of a decoder or a shard of it. Made by `models.loader.load_model`."""

    def __init__(self, shape: ModelShape, part: ModelPart, kernels: KernelSet, weights: DecoderWeights) -> None:
        """`weights`: loaded and finished. Their embedding is packed here; drop the plain one afterwards."""
        library = kernels.target.library
        assert library is not None, "this decoder needs the C library"
        self.shape = shape
        self.part = part
        self.kernels = kernels
        self.hidden_dtype = torch.float32
        self._library: CpuLibrary = library
        self._dtype = kernels.target.compute_dtype
        self._weights = CpuWeights(shape, weights, library, self._dtype)
        self.weight_bytes = self._weights.num_bytes
        self._rotary = RotaryTable(shape.rope, shape.head_dim)
        self._halves = range(2 * len(part.stage.layers))
        self._progress = ctypes.c_int64(0)
        self._addresses: tuple[KvPages, ctypes.Array[ctypes.c_void_p]] | None = None  # the cache, the layers' addresses

    @property
    def kv_layout(self) -> KvLayout:
        return kv_layout_of(self.shape, self.part)

    @property
    def progress(self) -> int:
        return self._progress.value

    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup = _ONE_RANK,
        wanted_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        pages = cache.pages[0]
        assert (pages.shape[1], pages.dtype) == (BLOCK_SIZE, self._dtype), (pages.shape, pages.dtype)
        library = self._library
        weights = self._weights
        residual_TD = inputs if weights.embedding is None else self._embed(inputs, weights.embedding, group)
        # The next stage needs all rows.
        wanted = None if wanted_rows is None or weights.final_norm_D is None else np.array(wanted_rows, dtype=np.int64)
        self._compute_layers(residual_TD, positions_T, batch, cache, group, wanted)
        if weights.final_norm_D is None:
            return residual_TD
        return library.normalise(self._dtype, residual_TD, weights.final_norm_D, self.shape.rms_norm_eps)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        head = self._weights.head
        assert head is not None, f"stage {self.part.stage.index} has no head"
        return self._library.multiply(self._dtype, head, hidden_ND.contiguous())

    def _compute_layers(
        self,
        residual_TD: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup,
        wanted_N: npt.NDArray[np.int64] | None,
    ) -> None:
        """Adds all layers to the residual stream in place. `wanted_N`: as `wanted_rows` of `forward`."""
        num_sequences = len(batch.query_lens)
        cosines_Th, sines_Th = self._rotary.rows(positions_T, max(batch.context_lens))
        query_lens = (ctypes.c_int64 * num_sequences)(*batch.query_lens)
        context_lens = (ctypes.c_int64 * num_sequences)(*batch.context_lens)
        block_tables_SB = batch.block_tables_SB.contiguous()
        pages = self._addresses_of(cache)
        # The arrays and tensors live at least as long as this call of the function.
        step = BatchStruct(
            num_tokens=residual_TD.shape[0],
            num_sequences=num_sequences,
            query_lens=ctypes.addressof(query_lens),
            context_lens=ctypes.addressof(context_lens),
            block_tables=block_tables_SB.data_ptr(),
            table_width=block_tables_SB.shape[1],
            slot_mapping=batch.slot_mapping_T.data_ptr(),
            cosines=cosines_Th.data_ptr(),
            sines=sines_Th.data_ptr(),
            pages=ctypes.addressof(pages),
            residual=residual_TD.data_ptr(),
            wanted_rows=None if wanted_N is None else wanted_N.ctypes.data,
            num_wanted=0 if wanted_N is None else len(wanted_N),
        )
        decoder = self._weights.decoder
        if self.part.shard.count == 1:
            self._library.forward(decoder, step, self._halves, self._progress)
            return
        for half in self._halves:
            partial_TD = torch.empty_like(residual_TD)
            self._library.forward(decoder, step, range(half, half + 1), self._progress, partial_TD)
            self._library.add(residual_TD, group.all_reduce(partial_TD))

    def _addresses_of(self, cache: KvPages) -> ctypes.Array[ctypes.c_void_p]:
        """Returns the addresses of the cache's layers. A rank has one cache, so the addresses are collected once."""
        if self._addresses is None or self._addresses[0] is not cache:
            addresses = (ctypes.c_void_p * len(cache.pages))(*(layer.data_ptr() for layer in cache.pages))
            self._addresses = (cache, addresses)
        return self._addresses[1]

    def _embed(self, token_ids_T: torch.Tensor, embedding: LinearStruct, group: TensorGroup) -> torch.Tensor:
        shard = self.part.shard
        if shard.count == 1:
            return self._library.embed(self._dtype, embedding, token_ids_T)
        # Only one rank has the row of a given token; the others add zeros.
        rows_T = token_ids_T - shard.part(self.shape.vocab_size).start
        elsewhere_T = (rows_T < 0) | (rows_T >= embedding.num_outputs)
        return group.all_reduce(self._library.embed(self._dtype, embedding, rows_T.masked_fill_(elsewhere_T, -1)))
