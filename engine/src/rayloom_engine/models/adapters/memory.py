"""The memory that LoRA adapters take on a rank."""

from __future__ import annotations

from rayloom_engine.models.adapters.peft_config import MOST_RANK
from rayloom_engine.models.decoder_spec import decoder_spec
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart

_MOST_PARTS = 3  # matrices of the checkpoint that one matrix of a rank stacks: q, k, v


def adapter_bytes(shape: ModelShape, part: ModelPart, rank: int, element_bytes: int) -> int:
    """Returns the bytes of an adapter of this rank that updates all matrices of a rank's part of the model."""
    linears = [linear for layer in decoder_spec(shape, part).layers for linear in layer.linears]
    padded = -(-rank // 16) * 16
    elements = sum(padded * (linear.num_inputs * len(linear.outputs) + linear.num_outputs) for linear in linears)
    return elements * element_bytes


def adapter_step_bytes(shape: ModelShape, num_shards: int, *, operand_bytes: int, num_tokens: int) -> int:
    """Returns the bytes that the largest step takes more if a token of it has an adapter: see step.cpp, adapters.cpp.

    The buffers are the reduced rows, and gate and up in float32.
    """
    feed_forward = -(-shape.intermediate_size // num_shards)
    return num_tokens * (_MOST_PARTS * MOST_RANK * operand_bytes + 2 * feed_forward * 4)
