"""Paged attention for transformers' modules, which call it through transformers' attention interface.

An attention module finds its part of the KV cache in its own attribute `paged_attention`, so two models in one process
do not share state. transformers makes masks by calling `mask_kind`. `mask_kind` returns only the window of the mask,
because paged attention hides later positions itself.

Legend: T tokens of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rayloom_engine.errors import ModelError
from rayloom_engine.kernels.attention import AttentionBatch, AttentionPlan, warm_up_attention
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.kv_write import KvWrite
from rayloom_engine.kv.cache import KvPages

IMPLEMENTATION = "rayloom_paged"  # the name in a transformers config
ATTRIBUTE = "paged_attention"


@dataclass(frozen=True, slots=True)
class MaskKind:
    """Describes an attention mask. `window`: positions that a token sees, itself included; None: all.

    `problem`: why paged attention cannot use the mask; empty if it can. The error is raised only when a layer uses the
    mask, because transformers also makes masks that no layer uses.
    """

    window: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rule by which one call computes scores."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks_H: torch.Tensor | None


class ModuleAttention(Protocol):
    """The value of the attribute `ATTRIBUTE` of an attention module: it computes the module's attention."""

    def __call__(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Returns the attention [T, H, D], with the head size of the values as D."""


class PagedStep:
    """The step that a model computes, shared by all its layers. An attention plan is made at its first use."""

    def __init__(self, kernels: KernelSet, kv_write: KvWrite) -> None:
        self.kernels = kernels
        self.kv_write = kv_write
        self._batch: AttentionBatch | None = None
        self._cache: KvPages | None = None
        self._plans: dict[tuple[Any, ...], AttentionPlan] = {}
        self._compiled: set[int] = set()  # layers whose kernels are compiled

    def begin(self, batch: AttentionBatch, cache: KvPages) -> None:
        self._batch = batch
        self._cache = cache
        self._plans = {}

    def end(self) -> None:
        """Drops the step's references to the cache, so that a rebuild of the engine can free the cache."""
        self._batch = None
        self._cache = None
        self._plans = {}

    def attend(self, layer: int, query_THD: torch.Tensor, key_value_T2KD: torch.Tensor, scores: Scores) -> torch.Tensor:
        assert self._batch is not None and self._cache is not None, "a module computes outside of a step"
        pages = self._cache.pages[layer]
        self.kv_write(pages, key_value_T2KD, self._batch.slot_mapping_T)
        num_heads = query_THD.shape[1]
        if layer not in self._compiled:
            self._compile(layer, num_heads, pages, scores)
        key = (scores.window, num_heads, *pages.shape[3:])
        if key not in self._plans:
            self._plans[key] = self.kernels.plan_attention(
                self._batch,
                num_heads=num_heads,
                pages=pages,
                window=scores.window,
                compute_dtype=query_THD.dtype,
            )
        return self._plans[key].attend(query_THD, pages, scores.scale, soft_cap=scores.soft_cap, sinks_H=scores.sinks_H)

    def _compile(self, layer: int, num_heads: int, pages: torch.Tensor, scores: Scores) -> None:
        """Compiles all kernels that the layer may launch, in the warm-up: a rank's first step, before any request."""
        self._compiled.add(layer)
        target = self.kernels.target
        warm_up_attention(target, num_heads=num_heads, pages=pages, soft_cap=scores.soft_cap, sinks_H=scores.sinks_H)


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Implements ModuleAttention for one layer of the KV cache. The cache's heads may be wider than the module's."""

    layer: int
    head_dim: int  # of the pages
    step: PagedStep

    def __call__(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        value_dim = value_TKD.shape[-1]
        # Padding with zeros changes neither a product of query and key, nor the columns [0, value_dim) of a value.
        key_value_T2KD = torch.stack((self._padded(key_TKD), self._padded(value_TKD)), dim=1)
        out_THD = self.step.attend(self.layer, self._padded(query_THD).contiguous(), key_value_T2KD, scores)
        return out_THD[..., :value_dim]

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        return F.pad(heads, (0, self.head_dim - heads.shape[-1])) if heads.shape[-1] < self.head_dim else heads


def register() -> None:
    """Makes `IMPLEMENTATION` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_kind)


def mask_kind(
    *, mask_function: Callable[..., Any], local_size: int | None = None, use_vmap: bool = False, **_: object
) -> MaskKind:
    """Returns the MaskKind of a mask of transformers. Its `mask_function` says which positions a token sees."""
    if use_vmap:
        return MaskKind(None, "its attention mask has a form of its own")
    if local_size is None:
        return MaskKind(None)
    # With a sliding window, the token at position `local_size` is the first that does not see position 0, but it sees
    # position 1. In chunked attention, this token is the first of a chunk, and sees neither position 0 nor 1.
    query = torch.tensor(local_size)
    seen = [bool(mask_function(0, 0, query, torch.tensor(position))) for position in (0, 1, local_size)]
    if seen != [False, local_size > 1, True]:
        return MaskKind(None, f"its attention is cut into chunks of {local_size} positions")
    return MaskKind(local_size)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskKind | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface for one flat sequence of tokens: [1, H, T, D] -> [1, T, H, D]."""
    window = options.get("sliding_window")
    if isinstance(attention_mask, MaskKind):
        window = attention_mask.window
        if attention_mask.problem:
            raise ModelError(attention_mask.problem, "Unsupported")
    elif attention_mask is not None:
        raise ModelError("its attention gets a mask of its own form", "Unsupported")
    _refuse_unknown(module, options)
    sinks_H = options.get("s_aux")
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        soft_cap=options.get("softcap"),
        sinks_H=None if sinks_H is None else sinks_H.float(),
    )
    attend: ModuleAttention = getattr(module, ATTRIBUTE)
    out_THD = attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scores)
    return out_THD[None], None


# Options that may be tensors: `_attention` reads s_aux, and paged attention needs none of the others.
_WITHOUT_EFFECT = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "s_aux", "position_embeddings"}


def _refuse_unknown(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Raises ModelError for options that change the attention in a way that paged attention does not support."""
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError("its attention is bidirectional", "Unsupported")
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and name not in _WITHOUT_EFFECT:
            raise ModelError(f"its attention needs {name}", "Unsupported")
