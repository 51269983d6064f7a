"""Allocates a decoder for torch without filling its weights, and lists where each tensor of a checkpoint is copied.

`models/decoder_spec.py` says which rows and columns of the checkpoint a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.silu_mul import SiluMul as GateMul
from rayloom_engine.layers.attention import Attention
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.experts import MixtureOfExperts
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.layers.mlp import GatedMlp
from rayloom_engine.layers.schemes import SchemeFactory
from rayloom_engine.layers.schemes.dense import DenseSchemes
from rayloom_engine.models.decoder import CausalLM, DecoderLayer, DecoderWeights
from rayloom_engine.models.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, VectorSpec, decoder_spec
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart


def empty_model(
    shape: ModelShape, part: ModelPart, kernels: KernelSet, schemes: SchemeFactory | None = None
) -> tuple[CausalLM, dict[str, Destination]]:
    """Returns a rank's part of the model, and a mapping: tensor name in a checkpoint -> where to copy the tensor.

    In tensor names, layers have their number in the whole model; in the KV cache, their number in the stage. `schemes`
    decides how matrices are stored; without it they are dense.
    """
    if schemes is None:
        schemes = DenseSchemes(kernels.linear, kernels.target.compute_dtype, kernels.target.device)
    builder = _Builder(shape=shape, kernels=kernels, schemes=schemes)
    spec = decoder_spec(shape, part, schemes.cut_unit)
    return CausalLM(shape, part, kernels, spec, builder.weights(spec)), builder.destinations


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Allocates the parts of a model and collects the destinations of their tensors."""

    shape: ModelShape
    kernels: KernelSet
    schemes: SchemeFactory
    destinations: dict[str, Destination] = field(default_factory=dict)

    def weights(self, spec: DecoderSpec) -> DecoderWeights:
        embedding_VD = None if spec.embedding is None else self._embedding(spec.embedding)
        head: Linear | None = None
        layers = [self._layer(layer, cache_index) for cache_index, layer in enumerate(spec.layers)]
        final_norm_D = None if spec.final_norm is None else self._vector(spec.final_norm)
        if spec.is_tied:
            assert embedding_VD is not None, "a tied head is in the stage of its embedding"
            head = Linear(self.schemes.tied(embedding_VD))
        elif spec.head is not None:
            head = self._linear(spec.head)
        return DecoderWeights(embedding_VD=embedding_VD, layers=layers, final_norm_D=final_norm_D, head=head)

    def _layer(self, spec: LayerSpec, cache_index: int) -> DecoderLayer:
        shape = self.shape
        attention_norm_D = self._optional(spec.attention_norm)
        attention = Attention(
            layer=cache_index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            eps=shape.rms_norm_eps,
            score_scale=shape.score_scale,
            score_cap=shape.traits.score_cap,
            qkv=self._linear(spec.qkv),
            out=self._linear(spec.out),
            kernels=self.kernels,
            q_norm_d=self._optional(spec.q_norm),
            k_norm_d=self._optional(spec.k_norm),
            sinks_H=None if spec.sinks is None else self._sinks(spec.sinks),
            has_wide_norms=shape.traits.has_wide_qk_norm,
        )
        return DecoderLayer(
            attention_norm_D=attention_norm_D,
            attention=attention,
            attention_output_norm_D=self._optional(spec.attention_output_norm),
            mlp_norm_D=self._optional(spec.mlp_norm),
            mlp=self._mlp(spec.mlp) if isinstance(spec.mlp, MlpSpec) else self._experts(spec.mlp),
            mlp_output_norm_D=self._optional(spec.mlp_output_norm),
        )

    def _mlp(self, spec: MlpSpec) -> GatedMlp:
        return GatedMlp(
            gate_up=self._linear(spec.gate_up),
            down=self._linear(spec.down),
            gate_mul=self._gate_mul(),
            gated_linear=self.kernels.gated_linear if self.shape.traits.activation == "silu" else None,
        )

    def _gate_mul(self) -> GateMul:
        traits = self.shape.traits
        if traits.activation == "clamped_silu":
            return partial(self.kernels.clamped_silu_mul, slope=traits.gate_slope, limit=traits.gate_limit)
        return self.kernels.silu_mul if traits.activation == "silu" else self.kernels.gelu_mul

    def _experts(self, spec: ExpertsSpec) -> MixtureOfExperts:
        routing = spec.routing
        router = self._linear(spec.router)
        experts = [self._mlp(expert) for expert in spec.experts]
        return MixtureOfExperts(
            router=router,
            experts=experts[: routing.num_experts],
            num_experts_per_token=routing.num_experts_per_token,
            normalises_weights=routing.normalises_weights,
            shared=experts[-1] if routing.num_shared else None,
        )

    def _optional(self, spec: VectorSpec | None) -> torch.Tensor | None:
        return None if spec is None else self._vector(spec)

    def _vector(self, spec: VectorSpec) -> torch.Tensor:
        """Allocates a vector in the compute type."""
        return self._tensor(Destination(self._empty(spec.size)), spec.name)

    def _sinks(self, spec: VectorSpec) -> torch.Tensor:
        """Allocates the sinks of a layer in float32, because the kernels of attention add them to float32 scores.

        With a type of 16 bits, models/costs.py counts 2 bytes less for each query head.
        """
        sinks_H = torch.empty(spec.size, dtype=torch.float32, device=self.kernels.target.device)
        return self._tensor(Destination(sinks_H, spec.part), spec.name)

    def _tensor(self, destination: Destination, name: str) -> torch.Tensor:
        self.destinations[name] = destination
        return destination.tensor

    def _empty(self, *sizes: int) -> torch.Tensor:
        target = self.kernels.target
        return torch.empty(sizes, dtype=target.compute_dtype, device=target.device)

    def _embedding(self, spec: LinearSpec) -> torch.Tensor:
        """Allocates the rank's rows of the embedding."""
        (rows,) = spec.stacked()
        destination = Destination(self._empty(spec.num_outputs, spec.num_inputs), rows.weight_part)
        return self._tensor(destination, f"{rows.name}.weight")

    def _linear(self, spec: LinearSpec) -> Linear:
        scheme = self.schemes.linear(spec)
        self.destinations.update(scheme.destinations())
        return Linear(scheme)
