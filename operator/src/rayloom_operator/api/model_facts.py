"""The facts of a model that `rayloom-engine inspect` returns: its commit, its shape and its costs.

Sizing adds up the costs. The shape is shown in the status, and `status.sizing.inputs` is a hash that covers the shape.
So the existing fields of the shape must not change. A change would give other hashes, and every stored sizing would
become invalid.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rayloom_operator.api.costs import ELEMENT_BYTES, MAX_LAYERS, MAX_PARAMETERS, MAX_POSITIONS, Costs, WeightType
from rayloom_operator.api.draft_facts import DraftFacts, draft_costs

MAX_HEADS = 4096
MAX_WIDTH = 1 << 22
MAX_VOCABULARY = 1 << 24


Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]


class _FactsPart(BaseModel):
    # Fields are in snake_case in the engine's document, and in camelCase in the status.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ModelShape(_FactsPart):
    """Description of a decoder, in the engine's names."""

    architecture: str = Field(max_length=256, description="Class of the model, such as LlamaForCausalLM.")
    num_layers: int = Field(ge=1, le=MAX_LAYERS, description="Decoder layers.")
    hidden_size: Width = Field(description="Width of a layer.")
    intermediate_size: Width = Field(description="Width of the feed-forward part.")
    num_heads: Heads = Field(description="Query heads.")
    num_kv_heads: Heads = Field(description="Key and value heads.")
    head_dim: Width = Field(description="Width of a head.")
    vocab_size: int = Field(ge=1, le=MAX_VOCABULARY, description="Rows of the embedding.")
    max_position_embeddings: int = Field(ge=1, le=MAX_POSITIONS, description="Longest context in tokens.")
    tie_word_embeddings: bool = Field(description="The output uses the embedding's weights.")
    checkpoint_dtype: WeightType = Field(
        max_length=32, description="Type of the weights: bfloat16, float16 or float32."
    )
    qkv_bias: bool = Field(False, description="Query, key and value have a bias.")
    o_bias: bool = Field(False, description="The attention's output has a bias.")
    mlp_bias: bool = Field(False, description="The feed-forward part has biases.")
    qk_norm: bool = Field(False, description="Queries and keys are normalised head by head.")
    num_experts: Width | None = Field(
        None, description="Routed experts of a layer; absent if a layer has one MLP for all tokens."
    )
    num_experts_per_token: Width | None = Field(
        None, description="Routed experts that the router selects for each token."
    )
    moe_intermediate_size: Width | None = Field(None, description="Width of a routed expert.")
    model_backend: str | None = Field(
        None,
        max_length=32,
        description="Code of the model. transformers: that library's modules; absent: the engine's own decoder.",
    )
    attention_span: int | None = Field(
        None,
        ge=1,
        le=MAX_POSITIONS,
        description="Positions that a token sees in the layer with the widest window, itself included; "
        "absent if a token sees all positions in some layer.",
    )


class ModelFacts(_FactsPart):
    shape: ModelShape = Field(description="Sizes, as the model's configuration gives them.")
    num_parameters: int = Field(ge=1, le=MAX_PARAMETERS, description="Weights of the model.")
    num_active_parameters: Annotated[int, Field(ge=1, le=MAX_PARAMETERS)] | None = Field(
        None,
        description="Parameters that one token uses: all but those of the routed experts that the router does not "
        "select for it. Absent if the model has no experts.",
    )
    quantization: str | None = Field(
        None, max_length=64, description="How the checkpoint's weights are quantised; absent if they are dense."
    )
    version: str | None = Field(
        None,
        max_length=16,
        description="Version of the inspection. Absent if an operator of an earlier version stored the facts.",
    )
    commit: str | None = Field(
        None, max_length=256, description="Commit of a model on the hub. Every rank loads this commit."
    )
    costs: Costs | None = Field(
        None,
        description="The memory that the model takes, in parts that sizing adds. Absent if an engine of an earlier "
        "version inspected the model.",
    )
    draft: DraftFacts | None = Field(None, description="The draft model. Absent without spec.model.draft.")

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the stored weights. Without costs: an estimate from the number of parameters."""
        if self.costs is not None:
            return self.costs.checkpoint_bytes
        return self.num_parameters * ELEMENT_BYTES[self.shape.checkpoint_dtype]

    def as_draft(self) -> DraftFacts | None:
        """The facts of this model as a draft model; None if it has no costs, or if the engine refuses it as one."""
        # A draft model runs on the engine's own decoder.
        if self.costs is None or self.shape.model_backend is not None:
            return None
        return DraftFacts(
            architecture=self.shape.architecture,
            num_parameters=self.num_parameters,
            checkpoint_dtype=self.shape.checkpoint_dtype,
            quantization=self.quantization,
            commit=self.commit,
            costs=draft_costs(self.costs),
        )
