"""A model with memory for its weights but nothing in it, and where each tensor of a checkpoint belongs in it.

Fused matrices are allocated whole; the checkpoint's q, k, v, gate and up each have a slice of one as their destination,
so loading is a copy from the file to its final place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rayloom_engine.layers.attention import Attention
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.models.decoder import CausalLM, DecoderLayer
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.stage import Stage

_EMBEDDING = "model.embed_tokens.weight"


def empty_model(
    shape: ModelShape, stage: Stage, *, device: torch.device, compute_dtype: torch.dtype
) -> tuple[CausalLM, dict[str, torch.Tensor]]:
    """One stage of the model, and name in a Hugging Face checkpoint -> the tensor or slice to copy it into.

    Names count the layers of the whole model, the cache counts those of the stage.
    """
    made = _Destinations(device=device, dtype=compute_dtype)
    embedding_VD = final_norm_D = head = None
    if stage.is_first:
        embedding_VD = made.tensor(_EMBEDDING, shape.vocab_size, shape.hidden_size)
    layers = [_layer(shape, index, cache_index, made) for cache_index, index in enumerate(stage.layers)]
    if stage.is_last:
        final_norm_D = made.tensor("model.norm.weight", shape.hidden_size)
        if shape.tie_word_embeddings and embedding_VD is not None:
            head = Linear(embedding_VD)
        else:
            name = _EMBEDDING if shape.tie_word_embeddings else "lm_head.weight"
            head = Linear(made.tensor(name, shape.vocab_size, shape.hidden_size))
    model = CausalLM(
        shape=shape,
        stage=stage,
        compute_dtype=compute_dtype,
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=final_norm_D,
        head=head,
    )
    return model, made.destinations


@dataclass(slots=True, kw_only=True)
class _Destinations:
    device: torch.device
    dtype: torch.dtype
    destinations: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *sizes: int) -> torch.Tensor:
        made = torch.empty(sizes, dtype=self.dtype, device=self.device)
        self.destinations[name] = made
        return made

    def linear(self, prefix: str, names_to_rows: dict[str, int], num_columns: int, has_bias: bool) -> Linear:
        """One matrix for several of the checkpoint's, below each other in the order of the dict."""
        num_rows = sum(names_to_rows.values())
        weight = torch.empty((num_rows, num_columns), dtype=self.dtype, device=self.device)
        bias = torch.empty(num_rows, dtype=self.dtype, device=self.device) if has_bias else None
        start = 0
        for name, rows in names_to_rows.items():
            self.destinations[f"{prefix}.{name}.weight"] = weight[start : start + rows]
            if bias is not None:
                self.destinations[f"{prefix}.{name}.bias"] = bias[start : start + rows]
            start += rows
        return Linear(weight, bias)


def _layer(shape: ModelShape, index: int, cache_index: int, made: _Destinations) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv_rows = {"q_proj": shape.query_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
    gate_up_rows = {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size}
    return DecoderLayer(
        attention_norm_D=made.tensor(f"{prefix}.input_layernorm.weight", shape.hidden_size),
        attention=Attention(
            layer=cache_index,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.layer_windows[index],
            eps=shape.rms_norm_eps,
            qkv=made.linear(attention, qkv_rows, shape.hidden_size, shape.qkv_bias),
            out=made.linear(attention, {"o_proj": shape.hidden_size}, shape.query_size, shape.o_bias),
            q_norm_d=made.tensor(f"{attention}.q_norm.weight", shape.head_dim) if shape.qk_norm else None,
            k_norm_d=made.tensor(f"{attention}.k_norm.weight", shape.head_dim) if shape.qk_norm else None,
        ),
        mlp_norm_D=made.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden_size),
        mlp=GatedMlp(
            gate_up=made.linear(mlp, gate_up_rows, shape.hidden_size, shape.mlp_bias),
            down=made.linear(mlp, {"down_proj": shape.hidden_size}, shape.intermediate_size, shape.mlp_bias),
        ),
    )
