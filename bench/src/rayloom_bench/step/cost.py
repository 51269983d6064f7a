"""Bytes that a step must read, and its floating-point operations, for each phase. Pure.

All weights count once for a step, and so do the keys and values of each context. Activations are not counted, because
they stay in the processor's cache. A multiplication and an addition are two operations. Phases without an entry have a
limit too small to be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayloom_engine.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Cost:
    num_bytes: int
    num_flop: int

    def limit_s(self, read_bytes_s: float, flop_s: float) -> float:
        """Returns the least seconds in which a machine with these rates can do the work."""
        return max(self.num_bytes / read_bytes_s, self.num_flop / flop_s)


@dataclass(frozen=True, slots=True)
class ElementBytes:
    weights: int
    kv: int  # keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The tokens of a step: for each sequence the position of its first token, and the number of its tokens."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


def phase_costs(model: ModelShape, step: StepShape, element_bytes: ElementBytes) -> dict[str, Cost]:
    """Returns phase -> cost over all layers. Each sequence needs the logits of its last token."""
    query, key_value = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    matrices = {
        "qkv": (query + key_value) * model.hidden_size,
        "out": query * model.hidden_size,
        "gate, up": 2 * model.intermediate_size * model.hidden_size,
        "down": model.intermediate_size * model.hidden_size,
    }
    costs = {
        name: Cost(model.num_layers * size * element_bytes.weights, 2 * step.num_tokens * model.num_layers * size)
        for name, size in matrices.items()
    }
    costs["attention"] = _attention(model, step, key_value * element_bytes.kv)
    head = model.vocab_size * model.hidden_size
    costs["head"] = Cost(head * element_bytes.weights, 2 * len(step.counts) * head)
    return costs


def total(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.num_bytes for cost in costs), sum(cost.num_flop for cost in costs))


def _attention(model: ModelShape, step: StepShape, position_bytes: int) -> Cost:
    """Cost of attention: 4 operations for each token, query head, head element and visible position."""
    num_read = num_pairs = 0
    for window in model.layer_windows:
        for start, count in zip(step.starts, step.counts, strict=True):
            end = start + count
            first = 0 if window is None else max(0, start + 1 - window)
            num_read += end - first
            num_pairs += sum(min(position + 1, window or end) for position in range(start, end))
    return Cost(num_read * position_bytes, 4 * model.num_heads * model.head_dim * num_pairs)
