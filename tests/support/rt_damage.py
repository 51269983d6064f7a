"""Damages weights of a loaded rank, with any backend."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from rayloom_engine.cpu_library.arrays import ELEMENTS, copy_elements
from rayloom_engine.models.on_library.decoder import LibraryDecoder
from rayloom_engine.worker.loaded_rank import LoadedRank

NAN = float("nan")


def damage_token(rank: LoadedRank, token_id: int) -> None:
    """Makes the embedding of one token NaN. The vocabulary must be a multiple of 16."""
    model: Any = rank.loaded.model
    if not isinstance(model, LibraryDecoder):
        model._weights.embedding_VD[token_id] = NAN
        return
    library, dtype, embedding = model.library, model.dtype, model._weights.embedding
    assert embedding is not None
    wide_VD = library.embed(dtype, embedding, np.arange(embedding.num_outputs))
    wide_VD[token_id] = NAN
    _overwrite(model, embedding.weight, wide_VD)


def damage_norm(rank: LoadedRank) -> None:
    """Makes one weight of the stage's first layer NaN."""
    model: Any = rank.loaded.model
    if isinstance(model, LibraryDecoder):
        ctypes.c_float.from_address(model._weights.decoder.layers[0].mlp_norm).value = NAN
    else:
        model._weights.layers[0].mlp_norm_D[0] = NAN


def damage_head(rank: LoadedRank) -> None:
    """Makes all weights of the head NaN. The head must not be tied to the embedding."""
    model: Any = rank.loaded.model
    head = model._weights.head
    if isinstance(model, LibraryDecoder):
        assert head is not None
        _overwrite(model, head.weight, np.full((head.num_outputs, head.num_inputs), NAN, dtype=np.float32))
    else:
        head.scheme.weight = head.scheme.kernel.pack(torch.full(head.scheme.weight.shape, NAN))


def _overwrite(model: LibraryDecoder, place: int, wide_NK: np.ndarray) -> None:
    """Replaces a packed matrix by these numbers, rounded to the type of the weights."""
    plain_NK = np.empty(wide_NK.shape, dtype=ELEMENTS[model.dtype])
    copy_elements(plain_NK, wide_NK)
    packed_NK = model.library.pack(plain_NK)
    ctypes.memmove(place, packed_NK.ctypes.data, packed_NK.nbytes)
