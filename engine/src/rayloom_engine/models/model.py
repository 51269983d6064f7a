"""RankModel: the interface between a rank's runner and the module that computes its part of a model.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kv.cache import KvLayout, KvPages
from rayloom_engine.layers.schemes import WeightScheme
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import TensorGroup


class RankModel(Protocol):
    """A rank's part of a model. Stateless apart from its weights, so a runner can be replaced and the model kept."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def part(self) -> ModelPart: ...

    @property
    def kernels(self) -> KernelSet: ...

    @property
    def kv_layout(self) -> KvLayout:
        """The sizes of the KV cache that `forward` takes."""

    @property
    def schemes(self) -> Iterable[WeightScheme]:
        """The weights of every linear layer. The loader calls `finish` on each when all weights are loaded."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take in this process."""

    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup,
    ) -> torch.Tensor:
        """Hidden states [T, D]: after the final norm from the last stage, the residual stream from a stage before it.

        `inputs` are token ids [T], int64, for the first stage. The other stages take the hidden states of the stage
        before, and overwrite them. positions_T is int64 and counts from 0 in each sequence. Writes the keys and values
        of the T tokens into the cache, whose layers are those of the stage; all tokens that the T tokens attend to are
        in the cache already or in this batch. `group` consists of the stage's ranks, and all of them return the same.
        """

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits of some rows of `forward`'s result, [N, V], float32; V is the shard's. Only for the last stage."""
