"""RankModel: the interface between a rank's runner and the module that computes the rank's part of a model.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.given_rows import GivenRows
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import TensorGroup


class RankModel(Protocol):
    """A rank's part of a model. Its only state is the weights, so a new runner can use it, too."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def part(self) -> ModelPart: ...

    @property
    def kernels(self) -> KernelSet: ...

    @property
    def kv_layout(self) -> KvLayout:
        """Sizes of the KV cache that `forward` needs."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type in which stages send hidden states: that of the residual stream, so that sending rounds nothing."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in this process."""

    def warm_up(self, cache: KvPages) -> None:
        """Compiles kernels that the model's steps may launch, so that no kernel is compiled while requests wait."""

    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup[torch.Tensor],
        wanted_rows: Sequence[int] | None = None,
        given: GivenRows[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns hidden states [T, D].

        The last stage returns them after the final norm; earlier stages return the residual stream.

        `inputs`: token ids [T], int64, in the first stage. In later stages, these are the hidden states of the previous
        stage, and `forward` overwrites them. positions_T is int64 and counts from 0 in each sequence. `forward` writes
        the keys and values of the T tokens into the cache of the stage's layers. All earlier tokens to which the T
        tokens attend must be in this cache or in this batch. `group`: the stage's ranks; all of them return the same
        result.

        `wanted_rows`: ascending rows of the last stage's result that the caller reads; None: all. Rows that are not
        wanted are undefined.

        `given`: embeddings that replace those of tokens in `inputs`, in the first stage. They are rounded to the type
        of the hidden states.
        """

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [N, V] of N rows of `forward`'s result. Only the last stage computes logits.

        V: the part of the vocabulary that this rank computes.
        """
