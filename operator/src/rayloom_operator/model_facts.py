"""What `rayloom-engine inspect` says about a model, as far as sizing needs it: its shape, not its weights."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rayloom_operator.api import Model


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class ModelShape(_Part):
    """Sizes of a decoder, named as the engine names them."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    checkpoint_dtype: str  # float32, bfloat16 or float16
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class ModelFacts(_Part):
    shape: ModelShape
    num_parameters: int
    commit: str | None = None  # of a hub's model; None for other sources


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
