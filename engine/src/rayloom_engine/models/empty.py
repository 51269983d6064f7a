"""Allocates a decoder without filling its weights, and lists where each tensor of a checkpoint has to be copied.

Fused matrices are allocated as a whole, and the checkpoint's q, k, v, gate and up each go into a slice of one: loading
copies from the file straight to the final place. With tensor parallelism q, k, v, gate, up, embedding and head are cut
by rows, o and down by columns. The rows that a rank has of q, k, v, gate and up produce exactly the columns that it
needs for o and down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.layers.attention import Attention
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.layers.schemes import AxisPart, LinearSpec, SchemeFactory
from rayloom_engine.layers.schemes.dense import DenseSchemes
from rayloom_engine.models.decoder import CausalLM, DecoderLayer, DecoderWeights
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart

_EMBEDDING = "model.embed_tokens.weight"


def empty_model(
    shape: ModelShape, part: ModelPart, kernels: KernelSet, schemes: SchemeFactory | None = None
) -> tuple[CausalLM, dict[str, Destination]]:
    """Returns a rank's part of the model, and tensor name in a Hugging Face checkpoint -> where to copy it.

    Arguments and destinations are those of `empty_weights`.
    """
    weights, destinations = empty_weights(shape, part, kernels, schemes)
    return CausalLM(shape, part, kernels, weights), destinations


def empty_weights(
    shape: ModelShape, part: ModelPart, kernels: KernelSet, schemes: SchemeFactory | None = None
) -> tuple[DecoderWeights, dict[str, Destination]]:
    """Returns the weights of a rank, and a map from each tensor name of a Hugging Face checkpoint to its destination.

    In tensor names, layers have their number in the whole model; in the KV cache, their number in the stage. `schemes`
    decides how matrices are stored; without it they are dense.
    """
    if schemes is None:
        schemes = DenseSchemes(kernels.linear, kernels.target.compute_dtype, kernels.target.device)
    builder = _Builder(shape=shape, part=part, kernels=kernels, schemes=schemes)
    stage = part.stage
    embedding_VD: torch.Tensor | None = None
    final_norm_D: torch.Tensor | None = None
    head: Linear | None = None
    if stage.is_first:
        embedding_VD = builder.embedding()
    layers = [builder.layer(index, cache_index) for cache_index, index in enumerate(stage.layers)]
    if stage.is_last:
        final_norm_D = builder.tensor("model.norm.weight", shape.hidden_size)
        head = builder.head(embedding_VD)
    weights = DecoderWeights(embedding_VD=embedding_VD, layers=layers, final_norm_D=final_norm_D, head=head)
    return weights, builder.destinations


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Allocates the parts of a model and collects the destinations of their tensors."""

    shape: ModelShape
    part: ModelPart
    kernels: KernelSet
    schemes: SchemeFactory
    destinations: dict[str, Destination] = field(default_factory=dict)

    def tensor(self, name: str, *sizes: int, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """Allocates a tensor outside the linear layers, in the compute type."""
        target = self.kernels.target
        made = torch.empty(sizes, dtype=target.compute_dtype, device=target.device)
        self.destinations[name] = Destination(made, part)
        return made

    def embedding(self) -> torch.Tensor:
        """Allocates the shard's rows of the embedding."""
        rows = self._vocabulary()
        return self.tensor(_EMBEDDING, len(rows), self.shape.hidden_size, part=() if rows.is_whole else (rows.slice,))

    def head(self, embedding_VD: torch.Tensor | None) -> Linear:
        """Returns the shard's rows of the head.

        A tied head multiplies by the embedding; if that is in another stage, by a copy.
        """
        shape = self.shape
        if shape.tie_word_embeddings and embedding_VD is not None:
            return Linear(self.schemes.tied(embedding_VD))
        name = _EMBEDDING.removesuffix(".weight") if shape.tie_word_embeddings else "lm_head"
        return self._linear(LinearSpec(outputs={name: self._vocabulary()}, inputs=_whole(shape.hidden_size)))

    def layer(self, index: int, cache_index: int) -> DecoderLayer:
        shape = self.shape
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            attention_norm_D=self.tensor(f"{prefix}.input_layernorm.weight", shape.hidden_size),
            attention=self._attention(f"{prefix}.self_attn", cache_index, shape.layer_windows[index]),
            mlp_norm_D=self.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden_size),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _attention(self, prefix: str, cache_index: int, window: int | None) -> Attention:
        shape = self.shape
        shard = self.part.shard
        heads = shard.part(shape.num_heads)
        kv_heads = shard.kv_heads(shape.num_kv_heads)
        query = self._head_rows(heads, shape.num_heads)
        key_value = self._head_rows(kv_heads, shape.num_kv_heads)
        return Attention(
            layer=cache_index,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=shape.head_dim,
            window=window,
            eps=shape.rms_norm_eps,
            qkv=self._linear(
                LinearSpec(
                    outputs={
                        f"{prefix}.q_proj": query,
                        f"{prefix}.k_proj": key_value,
                        f"{prefix}.v_proj": key_value,
                    },
                    inputs=_whole(shape.hidden_size),
                    has_bias=shape.qkv_bias,
                )
            ),
            out=self._by_columns(f"{prefix}.o_proj", query, shape.o_bias),
            kernels=self.kernels,
            q_norm_d=self.tensor(f"{prefix}.q_norm.weight", shape.head_dim) if shape.qk_norm else None,
            k_norm_d=self.tensor(f"{prefix}.k_norm.weight", shape.head_dim) if shape.qk_norm else None,
        )

    def _mlp(self, prefix: str) -> GatedMlp:
        shape = self.shape
        size = shape.intermediate_size
        feed_forward = AxisPart(self.part.shard.part(size, self.schemes.cut_unit), size)
        return GatedMlp(
            gate_up=self._linear(
                LinearSpec(
                    outputs={f"{prefix}.gate_proj": feed_forward, f"{prefix}.up_proj": feed_forward},
                    inputs=_whole(shape.hidden_size),
                    has_bias=shape.mlp_bias,
                )
            ),
            down=self._by_columns(f"{prefix}.down_proj", feed_forward, shape.mlp_bias),
            silu_mul=self.kernels.silu_mul,
        )

    def _by_columns(self, name: str, columns: AxisPart, has_bias: bool) -> Linear:
        """Returns the matrix `name` with only this shard's `columns`.

        The shards' results are summed, so only the first shard adds the bias.
        """
        return self._linear(
            LinearSpec(
                outputs={name: _whole(self.shape.hidden_size)},
                inputs=columns,
                has_bias=has_bias and self.part.shard.is_first,
            )
        )

    def _linear(self, spec: LinearSpec) -> Linear:
        scheme = self.schemes.linear(spec)
        self.destinations.update(scheme.destinations())
        return Linear(scheme)

    def _vocabulary(self) -> AxisPart:
        """Returns the shard's rows of an embedding or head."""
        return AxisPart(self.part.shard.part(self.shape.vocab_size), self.shape.vocab_size)

    def _head_rows(self, heads: range, num_heads: int) -> AxisPart:
        """Returns the rows of these attention heads."""
        head_dim = self.shape.head_dim
        return AxisPart(range(heads.start * head_dim, heads.stop * head_dim), num_heads * head_dim)


def _whole(size: int) -> AxisPart:
    return AxisPart(range(size), size)
