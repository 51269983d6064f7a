"""What `rayloom-engine inspect` says about a model, as far as sizing needs it: its shape, not its weights.

A model's author chooses its sizes, and sizing computes with them in the operator that all tenants share. So each has
bounds, far beyond any model that exists, also where it is read back from a status.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from rayloom_operator.api.spec import Model

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 1000
MAX_HEADS = 4096
MAX_WIDTH = 1 << 22
MAX_VOCABULARY = 1 << 24
# Of the products of these sizes too: what is computed from them is to fit into 64 bits of a status.
MAX_PARAMETERS = 1 << 50
MAX_POSITIONS = 1 << 30


def _dtype(name: str) -> str:
    if name not in ELEMENT_BYTES:
        raise ValueError(f"{name[:80]!r} is not a type of weights; known are {', '.join(ELEMENT_BYTES)}")
    return name


Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]


class _Part(BaseModel):
    # The engine writes Python's names, the status camelCase.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ModelShape(_Part):
    """Sizes of a decoder, named as the engine names them."""

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
    checkpoint_dtype: Annotated[str, AfterValidator(_dtype)] = Field(
        max_length=32, description="Type of the weights: bfloat16, float16 or float32."
    )
    qkv_bias: bool = Field(False, description="Query, key and value have a bias.")
    o_bias: bool = Field(False, description="The attention's output has a bias.")
    mlp_bias: bool = Field(False, description="The feed-forward part has biases.")
    qk_norm: bool = Field(False, description="Queries and keys are normalised head by head.")
    attention_span: int | None = Field(
        None,
        ge=1,
        le=MAX_POSITIONS,
        description="Positions that a token sees in every layer, itself included; none when a layer sees all.",
    )

    @model_validator(mode="after")
    def _is_no_larger_than_any(self) -> ModelShape:
        # As many as query, key, value, output, gate, up and down have, and embedding and head.
        layer = self.hidden_size * (4 * max(self.num_heads, self.num_kv_heads) * self.head_dim)
        layer += 3 * self.hidden_size * self.intermediate_size
        if self.num_layers * layer + 2 * self.vocab_size * self.hidden_size > MAX_PARAMETERS:
            raise ValueError(f"these sizes are those of a model with more than {MAX_PARAMETERS} parameters")
        return self


class ModelFacts(_Part):
    shape: ModelShape = Field(description="Sizes, as the model's configuration says.")
    num_parameters: int = Field(ge=1, le=MAX_PARAMETERS, description="Weights of the model.")
    commit: str | None = Field(
        None, max_length=256, description="Commit of a hub's model, by which every rank loads it."
    )


# These come with the engine's image, so nothing has to run to know them. A test holds them to what the engine says.
BUILTIN_FACTS = {
    "smollm2-135m": ModelFacts(
        shape=ModelShape(
            architecture="LlamaForCausalLM",
            num_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            checkpoint_dtype="bfloat16",
        ),
        num_parameters=134_515_008,
    )
}


def builtin_facts(model: Model) -> ModelFacts | None:
    """The facts of a built-in model; None for every other source."""
    return BUILTIN_FACTS.get(model.source.removeprefix("builtin://")) if model.source_kind == "builtin" else None
