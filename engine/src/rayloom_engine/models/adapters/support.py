"""The kinds of models that LoRA adapters can update."""

from __future__ import annotations

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.shape import ModelShape

REMOVE_IN_WORDS = (
    "remove adapters, managed_adapters and allow_runtime_lora_updating (in an LLMService: spec.model.adapters)"
)


def can_have_adapters(shape: ModelShape) -> bool:
    """Returns whether an adapter can update the model."""
    return not isinstance(shape, MeasuredShape) and shape.experts is None and not shape.traits.is_fused


def check_adapters(shape: ModelShape) -> None:
    """Raises ConfigError if no adapter can update the model. Called if the configuration allows adapters."""
    if can_have_adapters(shape):
        return
    if isinstance(shape, MeasuredShape):
        raise ConfigError(f"adapters: {needs_native(shape.architecture)}; {REMOVE_IN_WORDS}")
    if shape.experts is not None:
        raise ConfigError(
            f"adapters: {shape.architecture} has experts, and LoRA adapters cannot update such a model; "
            f"{REMOVE_IN_WORDS}, or merge an adapter into the model"
        )
    raise ConfigError(
        f"adapters: the checkpoints of {shape.architecture} have one matrix for q, k and v, and LoRA adapters "
        f"cannot update it; {REMOVE_IN_WORDS}, or merge an adapter into the model"
    )


def needs_native(architecture: str) -> str:
    """Returns the reason why adapters cannot update a model of the transformers backend."""
    return f"LoRA adapters need the native backend, and transformers' modules compute {architecture}"
