"""The memory of LoRA adapters on a rank. `models.costs` gives the same numbers to the operator.

    bytes of an adapter = layers of the rank's stage x elements of a layer x LoRA rank x bytes of an element,
                          with the LoRA rank rounded up to RANK_MULTIPLE and the product rounded up to PAGE_BYTES

A rank reserves this memory for each adapter slot, computed with the setting max_lora_rank. An adapter of a lower rank
takes the same memory. So the KV cache keeps its size when adapters are added or removed while the engine serves.
"""

from __future__ import annotations

from rayloom_engine.models.adapters.peft_config import MOST_RANK
from rayloom_engine.models.decoder_spec import decoder_spec
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import Stage

RANK_MULTIPLE = 16  # matrices of the C library have a multiple of 16 inputs and outputs
# Each adapter has a mapping of its own (cpu_library/memory.py), which may have huge pages of this size.
PAGE_BYTES = 2 << 20
_MOST_PARTS = 3  # matrices of the checkpoint that one matrix of a rank stacks: q, k, v
_MOST_OPERAND_BYTES = 4  # bytes of an element that a matrix product reads


def padded_rank(rank: int) -> int:
    """Returns the LoRA rank with which an adapter of LoRA rank `rank` is stored."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def layer_elements(shape: ModelShape, shard: Shard, cut_unit: int = 1) -> int:
    """Returns the number of elements of A and B, at LoRA rank 1, for all matrices of a layer in a rank's part.

    Layer 0 stands for all layers: in models that adapters can update, all layers have the same sizes. Each matrix of
    the checkpoint has an A of its own, even if the rank stacks several matrices. `cut_unit`: as in `decoder_spec`.
    """
    middle = Stage(1, 3, range(1))  # without embedding and head
    layer = decoder_spec(shape, ModelPart(middle, shard), cut_unit).layers[0]
    return sum(linear.num_inputs * len(linear.outputs) + linear.num_outputs for linear in layer.linears)


def adapter_bytes(shape: ModelShape, part: ModelPart, rank: int, *, element_bytes: int, cut_unit: int = 1) -> int:
    """Returns the bytes of an adapter of LoRA rank `rank` that updates all matrices of `part`, one rank's part."""
    elements = len(part.stage.layers) * layer_elements(shape, part.shard, cut_unit) * padded_rank(rank)
    return -(-elements * element_bytes // PAGE_BYTES) * PAGE_BYTES


def adapter_token_bytes(shape: ModelShape, num_shards: int) -> int:
    """Returns the additional bytes for each token of a step in which at least one token has an adapter.

    These are buffers for the products with A, and for gate and up in float32: see step.cpp and adapters.cpp.
    """
    feed_forward = -(-shape.intermediate_size // num_shards)
    return _MOST_PARTS * MOST_RANK * _MOST_OPERAND_BYTES + 2 * feed_forward * 4
