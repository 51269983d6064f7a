"""Damages weights of a loaded rank, with any backend."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from rayloom_engine.models.cpu_decoder import CpuDecoder
from rayloom_engine.worker.loaded_rank import LoadedRank

NAN = float("nan")


def damage_token(rank: LoadedRank, token_id: int) -> None:
    """Makes the embedding of one token NaN. The vocabulary must be a multiple of 16."""
    model: Any = rank._model
    if not isinstance(model, CpuDecoder):
        model._weights.embedding_VD[token_id] = NAN
        return
    library, dtype, embedding = model._library, model._dtype, model._weights.embedding
    assert embedding is not None
    plain_VD = library.embed(dtype, embedding, torch.arange(embedding.num_outputs)).to(dtype)
    plain_VD[token_id] = NAN
    packed_VD = library.pack(plain_VD)
    ctypes.memmove(embedding.weight, packed_VD.data_ptr(), packed_VD.nbytes)


def damage_norm(rank: LoadedRank) -> None:
    """Makes one number of the stage's first layer NaN."""
    model: Any = rank._model
    if isinstance(model, CpuDecoder):
        ctypes.c_float.from_address(model._weights.decoder.layers[0].mlp_norm).value = NAN
    else:
        model._weights.layers[0].mlp_norm_D[0] = NAN


def damage_head(rank: LoadedRank) -> None:
    """Makes all of the head NaN. It must not be tied to the embedding."""
    model: Any = rank._model
    head = model._weights.head
    if isinstance(model, CpuDecoder):
        assert head is not None
        packed = model._library.pack(torch.full((head.num_outputs, head.num_inputs), NAN, dtype=model._dtype))
        ctypes.memmove(head.weight, packed.data_ptr(), packed.nbytes)
    else:
        head.scheme.weight = head.scheme.kernel.pack(torch.full(head.scheme.weight.shape, NAN))
