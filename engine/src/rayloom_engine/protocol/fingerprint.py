"""Fingerprint: all properties of an engine on which its tokens depend.

From the fingerprints of two engines, a gateway knows whether one engine may continue the sequences of the other.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# The kinds of continuation. exact: one engine alone would sample the same tokens. rounding: the logits may differ by
# rounding. other model: no continuation.
Continuation = Literal["exact", "rounding", "other model"]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The model that an engine serves, and the code and data types with which it computes.

    LoRA adapters are not part of it, because an engine has many: each sequence has the digest of its adapter's files.
    """

    architecture: str
    commit: str | None  # commit of a hub model
    content_hash: str  # the commit; for a local model a hash of samples of its files (models/content_hash.py)
    tokenizer_hash: str  # hash of tokenizer.json
    dtype: str
    compute_dtype: str
    quantization: str
    # the code that computes: build and instruction set of the C library, or the versions of torch and transformers with
    # the hardware for which torch chooses its kernels. Engines of earlier versions leave out builds and versions.
    arithmetic: str
    tensor_parallel_size: int  # decides the order in which the ranks' sums are added
    engine_version: str
    max_model_len: int  # not compared: it only decides which sequences fit
    rope_context: int = 0  # the context by which the model's rotary embedding is scaled; 0: not scaled by the context


_OF_MODEL = ("architecture", "content_hash", "tokenizer_hash", "rope_context")
_OF_ARITHMETIC = (
    "dtype",
    "compute_dtype",
    "quantization",
    "arithmetic",
    "tensor_parallel_size",
    "engine_version",
)


def continuation(earlier: Fingerprint | None, later: Fingerprint | None) -> Continuation:
    """Returns how an engine with `later` continues sequences of an engine with `earlier`. Pure and symmetric.

    If a fingerprint is unknown (None), the models are assumed to be equal.
    """
    if earlier is None or later is None:
        return "rounding"
    if any(getattr(earlier, name) != getattr(later, name) for name in _OF_MODEL):
        return "other model"
    if any(getattr(earlier, name) != getattr(later, name) for name in _OF_ARITHMETIC):
        return "rounding"
    return "exact"


def differences(earlier: Fingerprint, later: Fingerprint) -> str:
    """Returns the fields that differ, with both values, for a message."""
    names = (*_OF_MODEL, "commit", *_OF_ARITHMETIC)
    pairs = ((name, getattr(earlier, name), getattr(later, name)) for name in names)
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
