"""The decoder-only transformer that Llama, Mistral, Qwen2 and Qwen3 all are; a ModelShape says which one.

A rank holds one stage of it: the first has the embedding, the last the final norm and the head, each its own layers.
With tensor parallelism it holds a shard of its stage, and the ranks of the stage sum what their shards add to the
residual stream, which each of them has whole.
Plain tensors and plain calls: there is no module tree, so a step costs little beyond its tensor operations.
Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.kv_cache import AttentionBatch, KvCache
from rayloom_engine.kernels.linear import LinearMethod
from rayloom_engine.kernels.paged_attention import AttentionPlan, plan_attention
from rayloom_engine.kernels.rms_norm import rms_norm
from rayloom_engine.layers.attention import Attention
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.models.rope import RotaryAngles
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import Stage
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup

_ONE_RANK = OneRank()


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    attention_norm_D: torch.Tensor
    attention: Attention
    mlp_norm_D: torch.Tensor
    mlp: GatedMlp


class CausalLM:
    """A stage of a model, weights in place. Made by `models.loader.load_model`; stateless apart from its weights."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        stage: Stage,
        shard: Shard,
        compute_dtype: torch.dtype,
        embedding_VD: torch.Tensor | None,
        layers: list[DecoderLayer],
        final_norm_D: torch.Tensor | None,
        head: Linear | None,
    ) -> None:
        """None where the stage has no such part. `head.weight` is `embedding_VD` itself when they are tied."""
        assert (embedding_VD is not None, final_norm_D is not None) == (stage.is_first, stage.is_last)
        self.shape = shape
        self.stage = stage
        self.shard = shard
        self.compute_dtype = compute_dtype
        self.device = layers[0].mlp_norm_D.device
        self.linear_method = LinearMethod(uses_onednn=False, reason="not chosen yet")
        self.num_bytes_read = 0  # of weights, from files; the loader counts
        self._embedding_VD = embedding_VD
        self._layers = layers
        self._final_norm_D = final_norm_D
        self._head = head
        self._angles = RotaryAngles(shape.rope, shape.head_dim, compute_dtype, self.device)
        self._has_shared_head = head is not None and head.weight is embedding_VD
        self._windows = tuple(dict.fromkeys(layer.attention.window for layer in layers))

    @torch.no_grad()
    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvCache,
        group: TensorGroup = _ONE_RANK,
    ) -> torch.Tensor:
        """Hidden states [T, D]: after the final norm from the last stage, the residual stream from one before it.

        `inputs` are token ids [T], int64, for the first stage, and what the stage before returned for the others, which
        is overwritten. positions_T is int64 and counts from 0 in each sequence. Writes the keys and values of the T
        tokens into the cache, whose layers are those of the stage; whatever the tokens attend to must be in it already
        or be part of this batch. `group` is of the stage's ranks; all of them return the same.
        """
        plans: dict[int | None, AttentionPlan] = {
            window: plan_attention(
                batch,
                num_heads=self._layers[0].attention.num_heads,
                pages=cache.pages[0],
                window=window,
                compute_dtype=self.compute_dtype,
            )
            for window in self._windows
        }
        angles = self._angles(positions_T)
        eps = self.shape.rms_norm_eps
        residual_TD = inputs if self._embedding_VD is None else self._embed(inputs, self._embedding_VD, group)
        update_TD: torch.Tensor | None = None  # what the last block adds to the residual stream
        for layer in self._layers:
            if update_TD is None:
                normed_TD = rms_norm(residual_TD, layer.attention_norm_D, eps)
            else:
                normed_TD = rms_norm(update_TD, layer.attention_norm_D, eps, residual_TD)
            update_TD = group.all_reduce(layer.attention(normed_TD, angles, plans[layer.attention.window], cache))
            normed_TD = rms_norm(update_TD, layer.mlp_norm_D, eps, residual_TD)
            update_TD = group.all_reduce(layer.mlp(normed_TD))
        assert update_TD is not None, "a stage has at least one layer"
        if self._final_norm_D is None:
            return residual_TD.add_(update_TD)
        return rms_norm(update_TD, self._final_norm_D, eps, residual_TD)

    @torch.no_grad()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits of some rows of `forward`'s result, [N, V], float32; V is the shard's. Of the last stage only."""
        assert self._head is not None, f"stage {self.stage.index} has no head"
        return self._head(hidden_ND).float()

    def _embed(self, token_ids_T: torch.Tensor, embedding_VD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        if self.shard.count == 1:
            return embedding_VD.index_select(0, token_ids_T)
        # Each token has its row on one rank; the others add nothing.
        rows_T = token_ids_T - self.shard.part(self.shape.vocab_size).start
        elsewhere_T = (rows_T < 0) | (rows_T >= embedding_VD.shape[0])
        rows_TD = embedding_VD.index_select(0, rows_T.masked_fill_(elsewhere_T, 0))
        return group.all_reduce(rows_TD.masked_fill_(elsewhere_T[:, None], 0))

    def pack(self, method: LinearMethod) -> None:
        """Brings the weights into the layout of `method`, one matrix at a time. Once, after they are filled."""
        self.linear_method = method
        for layer in self._layers:
            for linear in (*layer.attention.linears, *layer.mlp.linears):
                linear.pack(method)
        if self._head is not None:
            self._head.pack(method, keeps_layout=self._has_shared_head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take in this process."""
        total = sum(part_D.nbytes for part_D in (self._embedding_VD, self._final_norm_D) if part_D is not None)
        if self._head is not None and not self._has_shared_head:
            total += self._head.num_bytes
        for layer in self._layers:
            total += layer.attention_norm_D.nbytes + layer.mlp_norm_D.nbytes
            total += sum(linear.num_bytes for linear in (*layer.attention.linears, *layer.mlp.linears))
            for norm_d in (layer.attention.q_norm_d, layer.attention.k_norm_d):
                total += 0 if norm_d is None else norm_d.nbytes
        return total
