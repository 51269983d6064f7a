"""Tensors of a checkpoint that a model does not load, because they should repeat what it has. Their values are checked.

- A tied head: lm_head.weight must equal the embedding. transformers does not tie them if they differ.
- A bias that the model does not have: it must be zero. AutoGPTQ writes such a bias for every quantised matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.on_library.tensor_file import TensorFile

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_ROWS = 4096  # compared at a time, so that the result of a comparison stays small


def check_redundant(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ModelError if a redundant tensor has values of its own.

    `files`: name -> file of each redundant tensor; with HEAD, also of EMBEDDING.
    """
    if HEAD in files and not _are_equal(_read(files, HEAD), _read(files, EMBEDDING)):
        raise ModelError(
            f"{folder}: tie_word_embeddings is true, and {HEAD} is not the same as {EMBEDDING}; set "
            "tie_word_embeddings to false in config.json, or remove the tensor that is wrong"
        )
    for name in files:
        if name.endswith(".bias") and not _is_zero(_read(files, name)):
            raise ModelError(
                f"{folder}: {word(name)} is not zero, and by its config.json the model has no such bias; correct "
                "attention_bias or mlp_bias in config.json, or use another checkpoint"
            )


def _read(files: Mapping[str, Path], name: str) -> Array:
    return TensorFile(files[name]).read(name)


def _are_equal(first: Array, second: Array) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(
        np.array_equal(first[start : start + _ROWS], second[start : start + _ROWS])
        for start in range(0, len(first), _ROWS)
    )


def _is_zero(array: Array) -> bool:
    # Integers are the bits of bfloat16, whose highest bit is the sign.
    return not np.any(array & 0x7FFF if array.dtype == np.uint16 else array)
