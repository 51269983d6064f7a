"""Tensors of a checkpoint that a model does not load, because they should repeat what it has. Their values are checked.

- A tied head: lm_head.weight must equal the embedding. transformers does not tie them if they differ. It compares them
  in the type in which it loads the model, so either of them may be rounded to a shorter type.
- The bias of a quantised linear layer that has no bias by config.json: it must be zero. AutoGPTQ stores a bias tensor
  for each quantised linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, copy_elements
from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.on_library.tensor_file import TensorFile

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_ROWS = 1024  # compared at a time, so that the copies of a comparison stay small


def check_redundant(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ModelError if a redundant tensor has values of its own.

    `files`: name -> file of each redundant tensor; with HEAD, also of EMBEDDING.
    """
    # Each file is opened once: there may be a bias for each matrix of each expert.
    opened = {path: TensorFile(path) for path in set(files.values())}
    if HEAD in files and not _are_equal(opened[files[HEAD]].read(HEAD), opened[files[EMBEDDING]].read(EMBEDDING)):
        raise ModelError(
            f"{folder}: tie_word_embeddings is true, and {HEAD} is not the same as {EMBEDDING}; set "
            "tie_word_embeddings to false in config.json, or remove the tensor that is wrong"
        )
    for name, path in files.items():
        if name.endswith(".bias") and not _is_zero(opened[path].read(name)):
            raise ModelError(
                f"{folder}: {word(name)} is not zero, and by its config.json the model has no such bias; correct "
                "attention_bias or mlp_bias in config.json, or use another checkpoint"
            )


def _are_equal(first: Array, second: Array) -> bool:
    if first.shape != second.shape:
        return False
    dtype = _shorter(first.dtype, second.dtype)
    return all(
        np.array_equal(
            _rounded(first[start : start + _ROWS], dtype),
            _rounded(second[start : start + _ROWS], dtype),
        )
        for start in range(0, len(first), _ROWS)
    )


def _shorter(first: np.dtype[Any], second: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the type of two in which numbers have fewer digits."""
    by_digits = (ELEMENTS["bfloat16"], np.dtype(np.float16), ELEMENTS["float32"])
    return min(first, second, key=by_digits.index)


def _rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array
    if dtype == ELEMENTS["bfloat16"]:
        out = np.empty(array.shape, dtype=dtype)
        copy_elements(out, array)
        return out
    with np.errstate(over="ignore"):  # a number beyond float16 becomes infinite
        return array.astype(dtype)


def _is_zero(array: Array) -> bool:
    # Integers are the bits of bfloat16, whose highest bit is the sign.
    return not np.any(array & 0x7FFF if array.dtype == np.uint16 else array)
