"""The facts of a draft model in the document of `inspect`: its memory on the rank that samples. Pure.

One rank holds the whole draft model, so each list of numbers has one entry. The parts are sums over all layers, so the
document stays short.

    bytes of the draft model  = weights
    bytes of a KV block       = block size x (kv + the target model's KV of a token)
    bytes of a step           = the larger of both models' steps + the hidden states and logits of the target model
"""

from __future__ import annotations

import dataclasses

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.models.costs import Amounts, StepCosts, step_sequence_bytes, step_token_elements
from rayloom_engine.models.quantised.amounts import checkpoint_bytes, whole_amount
from rayloom_engine.models.shape import ModelShape


class _DraftPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DraftCosts(_DraftPart):
    """The memory of a draft model. The lists have one number, because one rank holds the whole model."""

    weights: Amounts = Field(description="All weights of the model.")
    kv: Amounts = Field(description="Keys and values of one token in all layers.")
    step: StepCosts = Field(description="Memory of the largest step of the model.")
    checkpoint_bytes: int = Field(ge=1, description="Bytes of the weights as a folder of safetensors holds them.")


class DraftFacts(_DraftPart):
    """A draft model that fits the target model."""

    commit: str | None = Field(None, description="The commit that the revision stands for; only of the hub's models.")
    architecture: str = Field(description="Class of the model, such as LlamaForCausalLM.")
    num_parameters: int = Field(ge=1, description="Weights of the model; a matrix with two uses counts once.")
    checkpoint_dtype: str = Field(description="Type of the weights: bfloat16, float16 or float32.")
    quantization: str | None = Field(
        None, description="How the checkpoint's weights are quantised; absent if they are dense."
    )
    costs: DraftCosts = Field(description="The memory that the model takes, in parts to add.")


def draft_facts(commit: str | None, shape: ModelShape) -> DraftFacts:
    """Returns the facts of a draft model. `commit`: of a hub model."""
    elements, num_bytes = whole_amount(dataclasses.replace(shape, scheme=None))
    assert num_bytes == 0, "dense weights have no packed bytes"
    weights = Amounts(elements=(elements,))
    if shape.scheme is not None:
        kept_elements, kept_bytes = whole_amount(shape)
        weights = Amounts(elements=(elements,), kept_elements=(kept_elements,), kept_bytes=(kept_bytes,))
    return DraftFacts(
        commit=commit,
        architecture=shape.architecture,
        num_parameters=shape.num_parameters,
        checkpoint_dtype=shape.checkpoint_dtype,
        quantization=None if shape.scheme is None else shape.scheme.label,
        costs=DraftCosts(
            weights=weights,
            kv=Amounts(elements=(shape.kv_bytes_per_token(1),)),
            step=StepCosts(
                token=Amounts(elements=(step_token_elements(shape, 1),)),
                sequence_bytes=step_sequence_bytes(shape),
            ),
            checkpoint_bytes=checkpoint_bytes(shape),
        ),
    )
