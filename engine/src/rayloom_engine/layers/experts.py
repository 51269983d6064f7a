"""The mixture-of-experts MLP: a router selects a few gated MLPs for each token, and their outputs are added up.

The rows of a step are grouped by expert, so that each expert multiplies all of its rows at once. The outputs of a
token's experts are added in the order of their weights, so the sum does not depend on the other tokens of the step.

Legend: T tokens of the step, D model width, E experts that the router selects from, K experts of a token, P pairs of a
token and one of its experts (T * K), R rows of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.mlp import GatedMlp


class Routes(NamedTuple):
    """The experts of each token, and their weights in the token's sum."""

    experts_TK: torch.Tensor  # int64
    weights_TK: torch.Tensor  # float32


class Groups(NamedTuple):
    """The pairs of a token and one of its experts, T * K in all, in the order of the experts, then of the tokens."""

    tokens_P: torch.Tensor  # int64: the token of each pair
    places_TK: torch.Tensor  # int64: the indices of each token's pairs in this order
    counts: list[int]  # pairs of each expert


def select_experts(logits_TE: torch.Tensor, num_selected: int, *, normalises: bool) -> Routes:
    """Returns the experts with the highest logits, and their probabilities in a softmax over all E experts.

    If router outputs are equal, the expert with the lower index is selected first. `normalises`: the probabilities of a
    token's experts are divided by their sum. `logits_TE`: float32.
    """
    # A stable sort, because torch.topk may select any of several equal logits.
    experts_TK = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_selected]
    weights_TK = torch.softmax(logits_TE, dim=-1).gather(1, experts_TK)
    if normalises:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routes(experts_TK, weights_TK)


def group_by_expert(experts_TK: torch.Tensor, num_experts: int) -> Groups:
    """Returns the pairs of tokens and experts, grouped by expert."""
    flat_P = experts_TK.flatten()
    order_P = flat_P.argsort(stable=True)
    places_P = torch.empty_like(order_P)
    places_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    counts = torch.bincount(flat_P, minlength=num_experts).tolist()
    return Groups(order_P // experts_TK.shape[1], places_P.view(experts_TK.shape), counts)


@dataclass(slots=True, kw_only=True)
class MixtureOfExperts:
    router: Linear  # rows: one for each of `experts`, then one for the gate of `shared`
    experts: list[GatedMlp]
    num_experts_per_token: int
    normalises_weights: bool
    shared: GatedMlp | None = None  # an expert of all tokens

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Returns [T, D], this rank's part of the sum over ranks."""
        num_experts = len(self.experts)
        logits_TE = self.router(hidden_TD).float()
        routes = select_experts(
            logits_TE[:, :num_experts], self.num_experts_per_token, normalises=self.normalises_weights
        )
        groups = group_by_expert(routes.experts_TK, num_experts)
        inputs = torch.split(hidden_TD[groups.tokens_P], groups.counts)
        outputs_PD = torch.cat(
            [expert(rows_RD) for expert, rows_RD in zip(self.experts, inputs, strict=True) if len(rows_RD)]
        )
        sum_TD = torch.zeros_like(hidden_TD, dtype=torch.float32)
        for k in range(self.num_experts_per_token):
            sum_TD.addcmul_(outputs_PD[groups.places_TK[:, k]].float(), routes.weights_TK[:, k : k + 1])
        if self.shared is not None:
            sum_TD.addcmul_(self.shared(hidden_TD).float(), torch.sigmoid(logits_TE[:, num_experts:]))
        return sum_TD.to(hidden_TD.dtype)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of ExpertsSpec.linears."""
        shared = () if self.shared is None else (self.shared,)
        return (self.router, *(linear for expert in (*self.experts, *shared) for linear in expert.linears))
