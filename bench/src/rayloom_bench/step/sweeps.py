"""The sweeps of the plot: decode by batch size, prompts by length, and one decoded token by context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayloom_bench.step.cost import StepShape, phase_costs
from rayloom_bench.step.limits import Limits
from rayloom_bench.step.rank import StepRank, decode_step, fastest, prefill_steps
from rayloom_bench.step.table import limit_of_step

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PREFILLS = (128, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (1024, 2048, 4096, 6144, 8192)
REPEATS = 3
LIMIT = "machine limit"
MEASURED = "measured"
EXPECTED = "first + KV bytes read"
TOKEN_PANEL = "one decoded token"


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram. `x_label` and `y_label` name the axes. `is_log`: both are logarithmic; otherwise y begins at 0."""

    title: str
    x_label: str
    y_label: str
    is_log: bool
    lines: tuple[Line, ...]


def sweep(rank: StepRank, limits: Limits, context: int, chunk: int, log: Callable[[str], object]) -> tuple[Panel, ...]:
    """Measures all three panels, for lengths up to the model's position limit. `log` receives a line for each point."""
    longest = rank.shape.max_position_embeddings

    def measured(num_sequences: int, num_positions: int, steps: list[StepShape]) -> float:
        seconds = sum(fastest(rank.runner(num_sequences, num_positions), steps, REPEATS).values())
        log(f"{num_sequences} sequences of {num_positions} tokens, {len(steps)} steps: {1e3 * seconds:.2f} ms")
        return seconds

    def limit(steps: Sequence[StepShape]) -> float:
        costs = [phase_costs(rank.shape, step, rank.element_bytes) for step in steps]
        return sum(limit_of_step(cost, limits) for cost in costs)

    decodes = {batch: [decode_step(batch, context)] for batch in BATCHES}
    prefills = {length: prefill_steps(length, chunk) for length in PREFILLS if length <= longest}
    tokens = {length: [decode_step(1, length)] for length in CONTEXTS if length <= longest}
    token_ms = {length: 1e3 * measured(1, length, steps) for length, steps in tokens.items()}
    return (
        Panel(
            title="decode",
            x_label=f"sequences of {context} tokens",
            y_label="output tokens per second",
            is_log=True,
            lines=(
                Line(MEASURED, tuple((n, n / measured(n, context, steps)) for n, steps in decodes.items())),
                Line(LIMIT, tuple((n, n / limit(steps)) for n, steps in decodes.items())),
            ),
        ),
        Panel(
            title="prefill",
            x_label=f"tokens of the prompt, in steps of {chunk}",
            y_label="prompt tokens per second",
            is_log=True,
            lines=(
                Line(MEASURED, tuple((n, n / measured(1, n, steps)) for n, steps in prefills.items())),
                Line(LIMIT, tuple((n, n / limit(steps)) for n, steps in prefills.items())),
            ),
        ),
        Panel(
            title=TOKEN_PANEL,
            x_label="context",
            y_label="milliseconds",
            is_log=False,
            lines=(
                Line(MEASURED, tuple(token_ms.items())),
                Line(EXPECTED, expected_token_ms(token_ms, rank, limits)),
            ),
        ),
    )


def expected_token_ms(token_ms: dict[int, float], rank: StepRank, limits: Limits) -> tuple[tuple[int, float], ...]:
    """The time at the first context, plus the time in which the machine reads the additional keys and values."""
    read_ms = {
        length: 1e3
        * phase_costs(rank.shape, decode_step(1, length), rank.element_bytes)["attention"].num_bytes
        / limits.read_bytes_s
        for length in token_ms
    }
    first = next(iter(token_ms))
    return tuple((length, token_ms[first] + read_ms[length] - read_ms[first]) for length in token_ms)
