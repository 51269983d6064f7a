"""The decoder-only transformer of all native families; ModelShape and its traits describe how families differ.

A rank holds one stage: its layers, in the first stage also the embedding, in the last stage also the final norm and the
head. With tensor parallelism a rank holds a shard of its stage. The ranks of a stage sum the outputs of their shards,
and each rank has a complete copy of the residual stream. The decoder calls functions on tensors, without a tree of
torch modules. So a step takes little more time than its kernels.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rayloom_engine.kernels.attention import AttentionBatch, AttentionPlan, warm_up_attention
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.rotary import RotaryTables
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.layers.attention import Attention, AttentionStep
from rayloom_engine.layers.experts import MixtureOfExperts
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.layers.schemes import WeightScheme
from rayloom_engine.models.decoder_spec import DecoderSpec
from rayloom_engine.models.given_rows import GivenRows
from rayloom_engine.models.rope.angles import RotaryAngles
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.torch_adapters import TorchAdapters
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup

_ONE_RANK = OneRank()


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    attention: Attention
    mlp: GatedMlp | MixtureOfExperts
    attention_norm_D: torch.Tensor | None  # this and the next three: norms of inputs and outputs; None: no norm
    attention_output_norm_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor | None
    mlp_output_norm_D: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.attention.linears, *self.mlp.linears)

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        found = (
            self.attention_norm_D,
            self.attention_output_norm_D,
            self.attention.q_norm_d,
            self.attention.k_norm_d,
            self.mlp_norm_D,
            self.mlp_output_norm_D,
        )
        return tuple(norm for norm in found if norm is not None)

    @property
    def vectors(self) -> tuple[torch.Tensor, ...]:
        sinks_H = self.attention.sinks_H
        return self.norms if sinks_H is None else (*self.norms, sinks_H)


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """The weights of one stage. A part that the stage does not have is None."""

    embedding_VD: torch.Tensor | None
    layers: list[DecoderLayer]
    final_norm_D: torch.Tensor | None
    head: Linear | None  # a tied head multiplies by `embedding_VD` itself

    @property
    def schemes(self) -> Iterator[WeightScheme]:
        for layer in self.layers:
            for linear in layer.linears:
                yield linear.scheme
        if self.head is not None:
            yield self.head.scheme

    @property
    def num_bytes(self) -> int:
        total = sum(part_D.nbytes for part_D in (self.embedding_VD, self.final_norm_D) if part_D is not None)
        total += sum(scheme.num_bytes for scheme in self.schemes)
        return total + sum(vector.nbytes for layer in self.layers for vector in layer.vectors)

    def add_to_norms(self, offset: float) -> None:
        """Adds `offset` to all norm weights. Call it once, after the weights are loaded."""
        finals = () if self.final_norm_D is None else (self.final_norm_D,)
        for norm in (*finals, *(norm for layer in self.layers for norm in layer.norms)):
            norm.add_(offset)


def kv_layout_of(shape: ModelShape, part: ModelPart) -> KvLayout:
    """Returns the sizes of the KV cache of a rank's part of a decoder."""
    return KvLayout(
        num_layers=len(part.stage.layers),
        num_kv_heads=len(part.shard.kv_heads(shape.num_kv_heads)),
        head_dim=shape.head_dim,
    )


class CausalLM:
    """Implements RankModel, for one stage of a decoder or a shard of it. Made by `models.loader.load_model`."""

    def __init__(
        self, shape: ModelShape, part: ModelPart, kernels: KernelSet, spec: DecoderSpec, weights: DecoderWeights
    ) -> None:
        stage = part.stage
        has_ends = (weights.embedding_VD is not None, weights.final_norm_D is not None)
        assert has_ends == (stage.is_first, stage.is_last)
        self.shape = shape
        self.part = part
        self.kernels = kernels
        self._weights = weights
        windows = tuple(dict.fromkeys(layer.attention.window for layer in weights.layers))
        of_ropes = {
            rope: RotaryAngles(rope, shape.head_dim, kernels) for rope in {shape.rope_of(window) for window in windows}
        }
        self._angles = {window: of_ropes[shape.rope_of(window)] for window in windows}
        self._windows = windows
        # The scale is rounded to the weights' type, as in training.
        scale = torch.tensor(shape.traits.embedding_scale, dtype=kernels.target.compute_dtype)
        self._embedding_scale = float(scale)
        self.adapters = TorchAdapters(shape, _matrices(spec, weights), kernels.target.compute_dtype)

    @property
    def kv_layout(self) -> KvLayout:
        return kv_layout_of(self.shape, self.part)

    @property
    def hidden_dtype(self) -> torch.dtype:
        return self.kernels.target.compute_dtype

    @property
    def schemes(self) -> Iterator[WeightScheme]:
        return self._weights.schemes

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    def warm_up(self, cache: KvPages) -> None:
        attention = self._weights.layers[0].attention
        warm_up_attention(
            self.kernels.target,
            num_heads=attention.num_heads,
            pages=cache.pages[0],
            soft_cap=attention.score_cap,
            sinks_H=attention.sinks_H,
        )

    @torch.no_grad()
    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup[torch.Tensor] = _ONE_RANK,
        wanted_rows: Sequence[int] | None = None,
        given: GivenRows[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        weights = self._weights
        rms_norm = self.kernels.rms_norm
        eps = self.shape.rms_norm_eps
        step = AttentionStep(
            rotary_tables=self._tables(positions_T),
            plans={window: self._plan(batch, cache, window) for window in self._windows},
            slot_mapping_T=batch.slot_mapping_T,
            cache=cache,
        )
        residual_TD = inputs
        if weights.embedding_VD is not None:
            residual_TD = self._embed(inputs, weights.embedding_VD, group, given)
        if self.shape.traits.has_updates:
            self._add_layers(residual_TD, step, group)
            return residual_TD if weights.final_norm_D is None else rms_norm(residual_TD, weights.final_norm_D, eps)
        update_TD: torch.Tensor | None = None  # output of attention or MLP that is not in the residual stream yet
        for layer in weights.layers:
            assert layer.attention_norm_D is not None and layer.mlp_norm_D is not None
            if update_TD is None:
                normed_TD = rms_norm(residual_TD, layer.attention_norm_D, eps)
            else:
                normed_TD = rms_norm(update_TD, layer.attention_norm_D, eps, residual_TD)
            update_TD = group.all_reduce(layer.attention(normed_TD, step))
            normed_TD = rms_norm(update_TD, layer.mlp_norm_D, eps, residual_TD)
            update_TD = group.all_reduce(layer.mlp(normed_TD))
        assert update_TD is not None, "a stage has at least one layer"
        if weights.final_norm_D is None:
            return residual_TD.add_(update_TD)
        return rms_norm(update_TD, weights.final_norm_D, eps, residual_TD)

    @torch.no_grad()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        head = self._weights.head
        assert head is not None, f"stage {self.part.stage.index} has no head"
        logits_NV = head(hidden_ND).float()
        traits = self.shape.traits
        if traits.logit_scale != 1.0:
            logits_NV = logits_NV * traits.logit_scale
        if traits.logit_cap is not None:
            logits_NV = (logits_NV / traits.logit_cap).tanh_().mul_(traits.logit_cap)
        return logits_NV

    def finish(self) -> None:
        """Prepares loaded weights for use. Called once."""
        if self.shape.traits.norm_offset:
            self._weights.add_to_norms(self.shape.traits.norm_offset)

    def _add_layers(self, residual_TD: torch.Tensor, step: AttentionStep, group: TensorGroup[torch.Tensor]) -> None:
        """Adds all layers' outputs to the residual stream in place, if there are output norms or a residual scale."""
        eps = self.shape.rms_norm_eps
        scale = self.shape.traits.residual_scale

        def normed(x_TD: torch.Tensor, norm_D: torch.Tensor | None) -> torch.Tensor:
            return x_TD if norm_D is None else self.kernels.rms_norm(x_TD, norm_D, eps)

        for layer in self._weights.layers:
            update_TD = group.all_reduce(layer.attention(normed(residual_TD, layer.attention_norm_D), step))
            residual_TD.add_(normed(update_TD, layer.attention_output_norm_D), alpha=scale)
            update_TD = group.all_reduce(layer.mlp(normed(residual_TD, layer.mlp_norm_D)))
            residual_TD.add_(normed(update_TD, layer.mlp_output_norm_D), alpha=scale)

    def _tables(self, positions_T: torch.Tensor) -> dict[int | None, RotaryTables]:
        """Returns the rotary tables for each window. Windows with the same rotary embedding share their tables."""
        of_angles = {angles: angles(positions_T) for angles in set(self._angles.values())}
        return {window: of_angles[angles] for window, angles in self._angles.items()}

    def _plan(self, batch: AttentionBatch, cache: KvPages, window: int | None) -> AttentionPlan:
        return self.kernels.plan_attention(
            batch,
            num_heads=self._weights.layers[0].attention.num_heads,
            pages=cache.pages[0],
            window=window,
            compute_dtype=self.kernels.target.compute_dtype,
        )

    def _embed(
        self,
        token_ids_T: torch.Tensor,
        embedding_VD: torch.Tensor,
        group: TensorGroup[torch.Tensor],
        given: GivenRows[torch.Tensor] | None,
    ) -> torch.Tensor:
        traits = self.shape.traits
        rows_TD = self._rows(token_ids_T, embedding_VD, group)
        if given is not None and not traits.has_scaled_embeds:
            rows_TD[given.rows_G] = given.embeds_GD.to(rows_TD.dtype)
        if traits.embedding_scale != 1.0:
            rows_TD.mul_(self._embedding_scale)
        if given is not None and traits.has_scaled_embeds:
            rows_TD[given.rows_G] = given.embeds_GD.to(rows_TD.dtype)
        return rows_TD

    def _rows(
        self, token_ids_T: torch.Tensor, embedding_VD: torch.Tensor, group: TensorGroup[torch.Tensor]
    ) -> torch.Tensor:
        shard = self.part.shard
        if shard.count == 1:
            return embedding_VD.index_select(0, token_ids_T)
        # Only one rank has the row of a given token; the others add zeros.
        rows_T = token_ids_T - shard.part(self.shape.vocab_size).start
        elsewhere_T = (rows_T < 0) | (rows_T >= embedding_VD.shape[0])
        rows_TD = embedding_VD.index_select(0, rows_T.masked_fill_(elsewhere_T, 0))
        return group.all_reduce(rows_TD.masked_fill_(elsewhere_T[:, None], 0))


def _matrices(spec: DecoderSpec, weights: DecoderWeights) -> list[tuple[LinearSpec, Linear]]:
    """Returns the matrices of all layers."""
    pairs = zip(spec.layers, weights.layers, strict=True)
    return [pair for each, layer in pairs for pair in zip(each.linears, layer.linears, strict=True)]
