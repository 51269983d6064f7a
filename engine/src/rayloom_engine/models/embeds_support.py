"""The kinds of models that can compute prompts of embeddings, and the memory that these take."""

from __future__ import annotations

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.shape import ModelShape


def check_takes_embeds(shape: ModelShape) -> None:
    """Raises ConfigError if the model cannot compute embeddings. Called if the configuration enables them.

    Modules of transformers are not trusted to compute the same from embeddings as from token ids: some read the token
    ids in their layers, too.
    """
    if isinstance(shape, MeasuredShape):
        raise ConfigError(
            "enable_prompt_embeds: prompts of embeddings need the native backend, and transformers' modules compute "
            f"{shape.architecture}; remove enable_prompt_embeds (in an LLMService: "
            "spec.engine.args.enablePromptEmbeds)"
        )


def embeds_step_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Returns the bytes of a step whose tokens all have given embeddings, beside those of the largest other step."""
    message = 4  # bytes of an element, as sent
    arrays = 4  # bytes of an element in float32
    return num_tokens * shape.hidden_size * (message + arrays)
