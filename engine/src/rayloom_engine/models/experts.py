"""Experts: the mixture-of-experts MLP of a model, as its config.json gives it. Pure.

In such an MLP, a router selects a few experts for each token by its hidden state. An expert is a gated MLP that
computes only the tokens for which it is selected. A shared expert is a further MLP, which computes every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.checkpoint.limits import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE

# The names of the checkpoint's tensors: gate_proj, up_proj and down_proj in `mlp`, or w1, w3 and w2 in
# `block_sparse_moe`.
ExpertNames = Literal["mlp", "block_sparse_moe"]
RouterName = Literal["gate", "router"]

# Patterns of the names of routers.
ROUTERS = ("*.mlp.gate", "*.mlp.router", "*.block_sparse_moe.gate", "*.shared_expert_gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model. All layers except `dense_layers` have the same numbers and sizes of experts."""

    num_experts: int  # experts from which the router selects
    num_experts_per_token: int
    moe_intermediate_size: int  # intermediate size of each of these experts
    size_field: str = "moe_intermediate_size"  # the field of config.json that gives this size
    shared_intermediate_size: int = 0  # intermediate size of the shared expert; 0: there is none
    normalises_weights: bool  # the weights of a token's experts are divided by their sum
    dense_layers: frozenset[int] = frozenset()  # layers with one MLP for all tokens
    names: ExpertNames = "mlp"
    router: RouterName = "gate"
    have_biases: bool = False  # the router and all matrices of the experts have biases
    are_stacked: bool = False  # the checkpoint has one tensor for all experts of a layer: models/stacked_experts.py

    @property
    def num_shared(self) -> int:
        return int(self.shared_intermediate_size > 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Intermediate sizes of all experts of a layer, that of the shared expert last."""
        return (self.moe_intermediate_size,) * self.num_experts + (self.shared_intermediate_size,) * self.num_shared

    @property
    def named_sizes(self) -> dict[str, int]:
        """The intermediate sizes of the selected experts and of the shared expert, by field of config.json."""
        sizes = {self.size_field: self.moe_intermediate_size}
        return sizes | ({"shared_expert_intermediate_size": self.shared_intermediate_size} if self.num_shared else {})

    def active_size(self, num_shards: int, cut_unit: int = 1) -> int:
        """Returns the most that the intermediate sizes of a token's experts add up to on one of `num_shards` ranks.

        `cut_unit`: a rank has a multiple of this number of intermediate elements.
        """

        def largest(size: int) -> int:
            return -(-size // (cut_unit * num_shards)) * cut_unit

        return self.num_experts_per_token * largest(self.moe_intermediate_size) + largest(self.shared_intermediate_size)

    def layer_parameters(self, hidden_size: int) -> int:
        """Returns the number of weights of a layer's router and experts."""
        num_routed = self.num_experts + self.num_shared
        return num_routed * (hidden_size + self.have_biases) + sum(
            self._parameters_of(size, hidden_size) for size in self.sizes
        )

    def inactive_parameters(self, hidden_size: int) -> int:
        """Returns the number of weights of a layer's experts that are not selected for a token."""
        of_expert = self._parameters_of(self.moe_intermediate_size, hidden_size)
        return of_expert * (self.num_experts - self.num_experts_per_token)

    def _parameters_of(self, size: int, hidden_size: int) -> int:
        """Returns the number of weights of an expert."""
        return 3 * hidden_size * size + (2 * size + hidden_size) * self.have_biases


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Describes how a family's config.json gives the experts. Numbers are transformers' defaults for absent fields."""

    num_experts: int
    num_experts_per_token: int
    size_field: str = "moe_intermediate_size"
    size: int | None = None  # default of `size_field`; None: config.json must have the field
    shared_size: int | None = None  # default of shared_expert_intermediate_size; None: there is no shared expert
    always_normalises: bool = False  # False: norm_topk_prob decides whether weights are normalised
    has_dense_layers: bool = True  # mlp_only_layers and decoder_sparse_step may name dense layers
    names: ExpertNames = "mlp"
    router: RouterName = "gate"
    have_biases: bool = False
    are_stacked: bool = False


def read_experts(config: ConfigJson, fields: ExpertFields, num_layers: int) -> Experts:
    """Returns the experts of a model. Raises ModelError."""
    # transformers writes num_local_experts for some families whose published files have num_experts.
    count_field = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = config.count(count_field, fields.num_experts, at_most=MAX_EXPERTS // num_layers)
    num_per_token = config.count("num_experts_per_tok", fields.num_experts_per_token)
    if num_per_token > num_experts:
        raise ModelError(f"{config.path}: num_experts_per_tok {num_per_token} is more than {count_field} {num_experts}")
    shared_size = 0
    if fields.shared_size is not None:
        shared_size = config.count("shared_expert_intermediate_size", fields.shared_size, at_most=MAX_SIZE)
    return Experts(
        num_experts=num_experts,
        num_experts_per_token=num_per_token,
        moe_intermediate_size=config.count(fields.size_field, fields.size, at_most=MAX_SIZE),
        size_field=fields.size_field,
        shared_intermediate_size=shared_size,
        normalises_weights=fields.always_normalises or config.flag("norm_topk_prob"),
        dense_layers=_dense_layers(config, num_layers) if fields.has_dense_layers else frozenset(),
        names=fields.names,
        router=fields.router,
        have_biases=fields.have_biases,
        are_stacked=fields.are_stacked,
    )


def _dense_layers(config: ConfigJson, num_layers: int) -> frozenset[int]:
    """Returns the layers with one MLP for all tokens.

    These are the layers in mlp_only_layers, and each layer i for which decoder_sparse_step does not divide i + 1.
    """
    given = config.get("mlp_only_layers") or []
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise ModelError(f"{config.path}: mlp_only_layers must be a list of layers, given {shown(given)}")
    period = config.count("decoder_sparse_step", 1, at_most=MAX_LAYERS)
    named = {layer for layer in given if 0 <= layer < num_layers}
    return frozenset(named | {layer for layer in range(num_layers) if (layer + 1) % period})
