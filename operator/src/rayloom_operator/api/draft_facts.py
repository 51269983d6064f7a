"""The facts of a draft model, which `rayloom-engine inspect --draft-model` returns with the facts of the model.

One rank holds the whole draft model, so each list of the costs has one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from rayloom_operator.api.costs import MAX_PARAMETERS, Amounts, Costs, CostsPart, Count, StepCosts, WeightType


class DraftCosts(CostsPart):
    weights: Amounts = Field(description="All weights of the draft model.")
    kv: Amounts = Field(description="Keys and values of one token in all layers.")
    step: StepCosts = Field(description="Memory of the largest step of the draft model.")
    checkpoint_bytes: Annotated[Count, Field(ge=1)] = Field(
        description="Bytes of the weights as a folder of safetensors holds them."
    )

    @model_validator(mode="after")
    def _is_of_one_rank(self) -> DraftCosts:
        lists = [numbers for each in (self.weights, self.kv, self.step.token) for numbers in each.lists]
        if any(len(numbers) != 1 for numbers in lists):
            raise ValueError("each list must have one number, because one rank holds the whole draft model")
        if any(self.weights.bytes_at(0, 1, keeps_quantised=kept) > MAX_PARAMETERS for kept in (False, True)):
            raise ValueError(f"the weights are those of a model with more than {MAX_PARAMETERS} parameters")
        return self


class DraftFacts(CostsPart):
    architecture: str = Field(max_length=256, description="Class of the draft model, such as LlamaForCausalLM.")
    num_parameters: int = Field(ge=1, le=MAX_PARAMETERS, description="Weights of the draft model.")
    checkpoint_dtype: WeightType = Field(
        max_length=32, description="Type of the weights: bfloat16, float16 or float32."
    )
    quantization: str | None = Field(
        None, max_length=64, description="How the checkpoint's weights are quantised; absent if they are dense."
    )
    commit: str | None = Field(
        None, max_length=256, description="Commit of a draft model on the hub. Every engine loads this commit."
    )
    costs: DraftCosts = Field(description="The memory that the draft model takes, in parts that sizing adds.")


def draft_costs(costs: Costs) -> DraftCosts:
    """Returns the costs of a model that is used as a draft model: sums over its layers, for one rank."""
    of_kinds = list(zip(costs.numbers, costs.kinds, strict=True))
    return DraftCosts(
        weights=_sum([(1, costs.both), *((number, kind.weights) for number, kind in of_kinds)]),
        kv=_sum([(number, kind.kv) for number, kind in of_kinds]),
        step=StepCosts(token=_sum([(1, costs.step.token)]), sequence_bytes=costs.step.sequence_bytes),
        checkpoint_bytes=costs.checkpoint_bytes,
    )


def _sum(parts: Sequence[tuple[int, Amounts]]) -> Amounts:
    """Returns the sum for one rank. `parts`: how often each part counts."""
    elements = packed = kept_elements = kept_bytes = 0
    for number, part in parts:
        own_bytes = 0 if part.packed is None else part.packed[0]
        elements += number * part.elements[0]
        packed += number * own_bytes
        if part.kept_elements is None:
            kept_elements += number * part.elements[0]
            kept_bytes += number * own_bytes
        else:
            kept_elements += number * part.kept_elements[0]
            kept_bytes += number * (0 if part.kept_bytes is None else part.kept_bytes[0])
    is_kept = any(part.kept_elements is not None for _, part in parts)
    return Amounts(
        elements=(elements,),
        bytes=(packed,) if packed else None,
        kept_elements=(kept_elements,) if is_kept else None,
        kept_bytes=(kept_bytes,) if is_kept else None,
    )
