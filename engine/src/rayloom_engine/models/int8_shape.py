"""The requirements of quantised weights on a model's sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rayloom_engine.config import INT8_GROUP
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.shape import ModelShape


def check_int8(shape: ModelShape, dtype: str, num_shards: int) -> None:
    """Raises ConfigError if the model cannot have int8 weights with this `dtype` on `num_shards` ranks of a stage.

    The number of inputs of every product must be a multiple of INT8_GROUP, because groups of activations share a scale.
    """
    if dtype == "auto" and shape.checkpoint_dtype == "float16":
        raise ConfigError(
            "quantization: 'int8' works with dtype bfloat16 or float32, and auto means float16 for this checkpoint; "
            "set dtype to one of them"
        )
    feed_forward = min(shape.named_feed_forward_sizes.values())
    sizes = {
        "hidden_size": shape.hidden_size,
        "the query heads' size on a rank": shape.query_size // num_shards,
        **shape.named_feed_forward_sizes,
    }
    for name, size in sizes.items():
        if size % INT8_GROUP:
            raise ConfigError(
                f"quantization: 'int8' needs multiples of {INT8_GROUP}, and {name} is {size}; set "
                "quantization to 'none'"
            )
    if num_shards > feed_forward // INT8_GROUP:
        raise ConfigError(
            f"tensor_parallel_size: with quantization 'int8', {num_shards} ranks cannot share "
            f"{feed_forward // INT8_GROUP} groups of {INT8_GROUP} feed-forward inputs; use fewer ranks"
        )


def check_groups(shape: ModelShape, num_shards: int) -> None:
    """Raises ConfigError if `num_shards` ranks would have to cut a group of the checkpoint's quantised weights."""
    if num_shards not in (counts := aligned_counts(shape, range(1, num_shards + 1))):
        assert shape.scheme is not None
        raise ConfigError(
            f"tensor_parallel_size: {num_shards} ranks cannot cut the checkpoint's quantised weights "
            f"({shape.scheme.label}) between groups of {shape.scheme.cut_unit} inputs; use "
            f"{' or '.join(map(str, counts))}, or quantization 'none'"
        )


def aligned_counts(shape: ModelShape, counts: Iterable[int]) -> tuple[int, ...]:
    """Returns those numbers of ranks in `counts` with which the inputs of o and down are cut only between groups."""
    if shape.scheme is None:
        return tuple(counts)
    unit = shape.scheme.cut_unit
    return tuple(
        count
        for count in counts
        if shape.num_heads % count == 0
        and (shape.query_size // count) % unit == 0
        and min(shape.named_feed_forward_sizes.values()) // unit >= count
    )
