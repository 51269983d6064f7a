"""The models that the C library can compute."""

from __future__ import annotations

from rayloom_engine.cpu_library.arrays import ELEMENTS
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard

_LANES = 16  # float32 sums in one register: kernels compute this many elements at a time
_MAX_HEAD_DIM = 256  # kMaxHeadDim in kv_layout.h
_MAX_GROUP = 48  # query heads of a key/value head: kTileRows in kernels.h


def unsupported(shape: ModelShape, num_shards: int, dtype: str, cut_unit: int = 1) -> str:
    """Returns why the library cannot compute a model with weights of this type on `num_shards` ranks; empty if it can.

    `cut_unit`: as in WeightFormat. All ranks of a stage get the same result: either all of them use the library, or
    none. The reason is that they must sum arrays of the same type.
    """
    if isinstance(shape, MeasuredShape):
        return f"{shape.architecture} is computed by transformers' modules"
    if dtype not in ELEMENTS:
        return f"it has no kernels for {dtype}"
    shards = [Shard(index, num_shards) for index in range(num_shards)]
    sizes = {
        "head_dim": {shape.head_dim},
        "hidden_size": {shape.hidden_size},
    }
    for name, size in shape.named_feed_forward_sizes.items():
        sizes[f"{name} of a rank"] = {len(shard.part(size, cut_unit)) for shard in shards}
    for name, values in sizes.items():
        if wrong := [value for value in values if value % _LANES]:
            return f"{name} is {wrong[0]}, no multiple of {_LANES}"
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}, more than {_MAX_HEAD_DIM}"
    if (group := shape.num_heads // shape.num_kv_heads) > _MAX_GROUP:
        return f"a key/value head has {group} query heads, more than {_MAX_GROUP}"
    return ""
