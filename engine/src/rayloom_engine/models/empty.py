"""A model with memory for its weights but nothing in it, and where each tensor of a checkpoint belongs in it.

Fused matrices are allocated whole; the checkpoint's q, k, v, gate and up each have a slice of one as their destination,
so loading is a copy from the file to its final place. With tensor parallelism q, k, v, gate, up, embedding and head are
cut by rows, o and down by columns: a rank's rows of the former make the columns that it needs of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rayloom_engine.layers.attention import Attention
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.models.decoder import CausalLM, DecoderLayer
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import Stage

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tensor of the checkpoint belongs, or `part` of it; () = all of it."""

    tensor: torch.Tensor
    part: tuple[slice, ...] = ()


def empty_model(
    shape: ModelShape, stage: Stage, shard: Shard, *, device: torch.device, compute_dtype: torch.dtype
) -> tuple[CausalLM, dict[str, Destination]]:
    """One stage of the model, or a shard of it, and name in a Hugging Face checkpoint -> where to copy it.

    Names count the layers of the whole model, the cache counts those of the stage.
    """
    made = _Destinations(shard=shard, device=device, dtype=compute_dtype)
    embedding_VD = final_norm_D = head = None
    if stage.is_first:
        embedding_VD = made.vocabulary(_EMBEDDING, shape)
    layers = [_layer(shape, index, cache_index, made) for cache_index, index in enumerate(stage.layers)]
    if stage.is_last:
        final_norm_D = made.tensor("model.norm.weight", shape.hidden_size)
        if shape.tie_word_embeddings and embedding_VD is not None:
            head = Linear(embedding_VD)
        else:
            name = _EMBEDDING if shape.tie_word_embeddings else "lm_head.weight"
            head = Linear(made.vocabulary(name, shape))
    model = CausalLM(
        shape=shape,
        stage=stage,
        shard=shard,
        compute_dtype=compute_dtype,
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=final_norm_D,
        head=head,
    )
    return model, made.destinations


@dataclass(slots=True, kw_only=True)
class _Destinations:
    shard: Shard
    device: torch.device
    dtype: torch.dtype
    destinations: dict[str, Destination] = field(default_factory=dict)

    def tensor(self, name: str, *sizes: int, part: tuple[slice, ...] = ()) -> torch.Tensor:
        made = torch.empty(sizes, dtype=self.dtype, device=self.device)
        self.destinations[name] = Destination(made, part)
        return made

    def vocabulary(self, name: str, shape: ModelShape) -> torch.Tensor:
        """The shard's rows of an embedding or a head."""
        rows = self.shard.part(shape.vocab_size)
        return self.tensor(name, len(rows), shape.hidden_size, part=self._part(rows))

    def by_rows(self, prefix: str, names_to_rows: dict[str, range], num_columns: int, has_bias: bool) -> Linear:
        """One matrix for rows of several of the checkpoint's, below each other in the order of the dict."""
        num_rows = sum(map(len, names_to_rows.values()))
        weight = torch.empty((num_rows, num_columns), dtype=self.dtype, device=self.device)
        bias = torch.empty(num_rows, dtype=self.dtype, device=self.device) if has_bias else None
        start = 0
        for name, rows in names_to_rows.items():
            end = start + len(rows)
            self.destinations[f"{prefix}.{name}.weight"] = Destination(weight[start:end], self._part(rows))
            if bias is not None:
                self.destinations[f"{prefix}.{name}.bias"] = Destination(bias[start:end], self._part(rows))
            start = end
        return Linear(weight, bias)

    def by_columns(self, name: str, num_rows: int, columns: range, has_bias: bool) -> Linear:
        """Some columns of a matrix. The shards' results are summed, so only the first one has the bias."""
        part = (slice(None), *self._part(columns)) if self._part(columns) else ()
        weight = self.tensor(f"{name}.weight", num_rows, len(columns), part=part)
        return Linear(weight, self.tensor(f"{name}.bias", num_rows) if has_bias and self.shard.is_first else None)

    def _part(self, indices: range) -> tuple[slice, ...]:
        return () if self.shard.count == 1 else (slice(indices.start, indices.stop),)


def _layer(shape: ModelShape, index: int, cache_index: int, made: _Destinations) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads, kv_heads = made.shard.part(shape.num_heads), made.shard.kv_heads(shape.num_kv_heads)
    query, kv = (range(each.start * shape.head_dim, each.stop * shape.head_dim) for each in (heads, kv_heads))
    feed_forward = made.shard.part(shape.intermediate_size)
    return DecoderLayer(
        attention_norm_D=made.tensor(f"{prefix}.input_layernorm.weight", shape.hidden_size),
        attention=Attention(
            layer=cache_index,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=shape.head_dim,
            window=shape.layer_windows[index],
            eps=shape.rms_norm_eps,
            qkv=made.by_rows(
                attention, {"q_proj": query, "k_proj": kv, "v_proj": kv}, shape.hidden_size, shape.qkv_bias
            ),
            out=made.by_columns(f"{attention}.o_proj", shape.hidden_size, query, shape.o_bias),
            q_norm_d=made.tensor(f"{attention}.q_norm.weight", shape.head_dim) if shape.qk_norm else None,
            k_norm_d=made.tensor(f"{attention}.k_norm.weight", shape.head_dim) if shape.qk_norm else None,
        ),
        mlp_norm_D=made.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden_size),
        mlp=GatedMlp(
            gate_up=made.by_rows(
                mlp, {"gate_proj": feed_forward, "up_proj": feed_forward}, shape.hidden_size, shape.mlp_bias
            ),
            down=made.by_columns(f"{mlp}.down_proj", shape.hidden_size, feed_forward, shape.mlp_bias),
        ),
    )
