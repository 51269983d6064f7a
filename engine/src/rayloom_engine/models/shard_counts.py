"""The numbers of ranks that can share a layer of a model evenly. Pure."""

from __future__ import annotations

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.shape import ModelShape


def check_shards(shape: ModelShape, num_shards: int) -> None:
    """Raises ConfigError, listing the numbers that work, if `num_shards` ranks cannot share a layer of the model."""
    choices = shard_counts(shape)
    if isinstance(shape, MeasuredShape) and num_shards not in choices:
        stages = ", and for more ranks pipeline_parallel_size" if shape.can_be_staged else ""
        reason = f": {shape.unshared}" if shape.unshared else " in equal parts with model_backend transformers"
        raise ConfigError(
            f"tensor_parallel_size: {num_shards} ranks cannot share a layer of {shape.architecture}{reason}; "
            f"use {_either(choices)}{stages}"
        )
    if num_shards not in choices and shape.traits.has_wide_qk_norm:
        raise ConfigError(
            f"tensor_parallel_size: {num_shards} ranks cannot share a layer of {shape.architecture}, whose norms of "
            f"queries and keys are of all heads together; use 1, and for more ranks pipeline_parallel_size, 1 to "
            f"{shape.num_layers}"
        )
    if num_shards not in choices:
        raise ConfigError(
            f"tensor_parallel_size: {num_shards} ranks cannot share {shape.num_heads} attention heads and "
            f"{shape.num_kv_heads} key/value heads of a layer evenly; use {_either(choices)}, and for more ranks "
            f"pipeline_parallel_size, 1 to {shape.num_layers}"
        )


def check_stages(shape: ModelShape, num_stages: int) -> None:
    """Raises ConfigError if the layers of the model cannot be shared by several stages."""
    if isinstance(shape, MeasuredShape) and num_stages > 1 and not shape.can_be_staged:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} stages cannot share the layers of {shape.architecture}, which "
            "transformers' modules compute, because a layer reads more than the output of the layer before it; use 1"
        )


def shard_counts(shape: ModelShape) -> tuple[int, ...]:
    """Returns all numbers of ranks that can share a layer.

    Each rank gets the same number of query heads, and whole key/value heads. There may be more ranks than key/value
    heads, if the number of ranks is a multiple of the number of these heads. Each of these heads is then on several
    ranks. With transformers' modules, there cannot be more ranks than key/value heads.
    """
    if isinstance(shape, MeasuredShape):
        return (1, *(share.count for share in shape.shares))
    if shape.traits.has_wide_qk_norm:
        return (1,)
    most = min(shape.num_heads, shape.vocab_size, *shape.named_feed_forward_sizes.values())
    return tuple(
        count
        for count in range(1, most + 1)
        if shape.num_heads % count == 0 and (shape.num_kv_heads % count == 0 or count % shape.num_kv_heads == 0)
    )


def _either(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
