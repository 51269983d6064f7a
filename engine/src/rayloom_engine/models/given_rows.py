"""GivenRows: the embeddings in a step's prompts, which replace rows of the embedding matrix in the first stage.

Legend: G given rows, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.embeds import Embeds

ArrayT = TypeVar("ArrayT")  # a torch tensor or a numpy array


@dataclass(frozen=True, slots=True)
class EmbedsAt:
    """Embeddings of the tokens [start, start + number of rows) of a step."""

    start: int
    embeds: Embeds


@dataclass(frozen=True, slots=True)
class GivenRows(Generic[ArrayT]):
    """Embeddings as arrays."""

    rows_G: ArrayT  # int64: indices of the step's tokens
    embeds_GD: ArrayT


def given_rows(parts: Sequence[EmbedsAt]) -> GivenRows[npt.NDArray[Any]] | None:
    """Returns all parts together, with embeddings in float32; None without parts.

    float32 has every value of the other types.
    """
    if not parts:
        return None
    rows = [np.arange(part.start, part.start + part.embeds.num_rows, dtype=np.int64) for part in parts]
    return GivenRows(np.concatenate(rows), np.concatenate([_as_float32(part.embeds) for part in parts]))


def _as_float32(embeds: Embeds) -> npt.NDArray[np.float32]:
    shape = (embeds.num_rows, embeds.width)
    if embeds.dtype == "bfloat16":  # the upper half of a float32
        halves = np.frombuffer(embeds.data, dtype="<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    stored = np.frombuffer(embeds.data, dtype="<f4" if embeds.dtype == "float32" else "<f2")
    return stored.astype(np.float32, copy=False).reshape(shape)
