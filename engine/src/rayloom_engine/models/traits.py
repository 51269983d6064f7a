"""Traits: the differences of decoder families from Llama. Pure values, from which every backend builds a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayloom_engine.models.rope.parameters import RopeParameters

# clamped_silu: (u + 1) * g * sigmoid(gate_slope * g), where g = min(gate, gate_limit), and u is up, clamped to
# [-gate_limit, gate_limit]. The others: activation(gate) * up.
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
NormPlacement = Literal["before", "after", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The properties in which decoder families differ. The defaults are Llama's values."""

    activation: Activation = "silu"  # of gate and up
    gate_slope: float = 1.0  # this and gate_limit: only of clamped_silu
    gate_limit: float = 0.0
    norm_placement: NormPlacement = "before"  # attention and MLP normalise their inputs, their outputs, or both
    norm_offset: float = 0.0  # added to all norm weights of the checkpoint
    has_wide_qk_norm: bool = False  # the norms of queries and keys each normalise all heads together
    is_fused: bool = False  # the checkpoint has one matrix for q, k and v, and one for gate and up
    embedding_scale: float = 1.0
    # The embeddings that a client gives are scaled already, as those of the model's embedding module in transformers
    # are. False: they are scaled here, like looked-up rows.
    has_scaled_embeds: bool = False
    residual_scale: float = 1.0  # factor of the outputs that attention and MLP add to the residual stream
    score_scale: float | None = None  # factor of the products of queries and keys; None: 1 / sqrt(head size)
    score_cap: float | None = None  # a score s becomes cap * tanh(s / cap); None: it stays s
    has_sinks: bool = False  # each query head has a sink: one more score in its softmax, without a value
    logit_scale: float = 1.0
    logit_cap: float | None = None
    window_rope: RopeParameters | None = None  # of layers with a window; None: the same as in all other layers

    @property
    def num_norms(self) -> int:
        """Norms of a layer, beside those of queries and keys."""
        return 4 if self.norm_placement == "both" else 2

    @property
    def has_updates(self) -> bool:
        """True if outputs of attention or MLP are normalised or scaled before the sum with the residual stream."""
        return self.norm_placement != "before" or self.residual_scale != 1.0


LLAMA = Traits()
