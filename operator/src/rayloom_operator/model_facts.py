"""What `rayloom-engine inspect` says about a model, as far as sizing needs it: its shape, not its weights."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rayloom_operator.api import Model


class _Part(BaseModel):
    # The engine writes Python's names, the status camelCase.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ModelShape(_Part):
    """Sizes of a decoder, named as the engine names them."""

    architecture: str = Field(description="Class of the model, such as LlamaForCausalLM.")
    num_layers: int = Field(description="Decoder layers.")
    hidden_size: int = Field(description="Width of a layer.")
    intermediate_size: int = Field(description="Width of the feed-forward part.")
    num_heads: int = Field(description="Query heads.")
    num_kv_heads: int = Field(description="Key and value heads.")
    head_dim: int = Field(description="Width of a head.")
    vocab_size: int = Field(description="Rows of the embedding.")
    max_position_embeddings: int = Field(description="Longest context in tokens.")
    tie_word_embeddings: bool = Field(description="The output uses the embedding's weights.")
    checkpoint_dtype: str = Field(description="Type of the weights: bfloat16, float16 or float32.")
    qkv_bias: bool = Field(False, description="Query, key and value have a bias.")
    o_bias: bool = Field(False, description="The attention's output has a bias.")
    mlp_bias: bool = Field(False, description="The feed-forward part has biases.")
    qk_norm: bool = Field(False, description="Queries and keys are normalised head by head.")
    attention_span: int | None = Field(
        None, description="Positions that a token sees in every layer, itself included; none when a layer sees all."
    )


class ModelFacts(_Part):
    shape: ModelShape = Field(description="Sizes, as the model's configuration says.")
    num_parameters: int = Field(description="Weights of the model.")
    commit: str | None = Field(None, description="Commit of a hub's model, by which every rank loads it.")


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
