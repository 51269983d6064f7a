"""StepCost: the seconds of a step as a sum of four terms, fitted to the figures of `rayloom-engine bench step`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.core.step import SlotStep
from rayloom_engine.core.step_work import StepWork
from rayloom_engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    step_s: float  # seconds of every step, which reads all weights
    token_s: float  # seconds for each token, of a prompt or decoded
    context_s: float  # seconds to read keys and values of one position before a decoded token
    pair_s: float = 0.0  # seconds for each pair of a prompt's token and a position before it

    def seconds(self, slots: Iterable[SlotStep], held_positions: int) -> float:
        """Returns the seconds of a step with these parts.

        `held_positions`: positions of all KV blocks that running sequences hold. A block that several sequences share
        is read from memory once.
        """
        num_tokens = 0
        num_positions = 0
        num_pairs = 0.0
        for slot in slots:
            num = slot.num_tokens
            num_tokens += num
            if num == 1:
                num_positions += slot.start + 1
            else:
                num_pairs += num * (slot.start + num / 2)
        num_positions = min(num_positions, held_positions)
        return self.step_s + self.token_s * num_tokens + self.context_s * num_positions + self.pair_s * num_pairs

    def work(self) -> StepWork:
        """Returns operation counts for the engine's own forecast of steps.

        The count of a token, divided by the count of a pair, is `token_s / pair_s`.
        """
        return StepWork(flops_per_token=1.0, flops_per_pair=self.pair_s / self.token_s)


# SmolLM2-135M in bfloat16 on 2 cores of an AMD EPYC with AVX-512, fitted to docs/benchmarks/step.md. The costs
# reproduce the measured points of that page within 11 %, on average within 4 %.
SMOLLM2_2_CORES = StepCost(step_s=5.642e-3, token_s=205.7e-6, context_s=0.7921e-6, pair_s=0.1176e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """Measured seconds of one or more steps, with the number of steps, tokens, positions and pairs in them."""

    num_steps: float
    num_tokens: float
    num_positions: float = 0.0
    num_pairs: float = 0.0
    seconds: float


def decode_point(num_sequences: int, context: int, seconds: float) -> StepPoint:
    return StepPoint(num_steps=1, num_tokens=num_sequences, num_positions=num_sequences * context, seconds=seconds)


def prompt_point(length: int, chunk: int, seconds: float) -> StepPoint:
    """The point of a prompt that is computed in steps of `chunk` tokens."""
    chunks = [(start, min(chunk, length - start)) for start in range(0, length, chunk)]
    pairs = sum(num * (start + num / 2) for start, num in chunks)
    return StepPoint(num_steps=-(-length // chunk), num_tokens=length, num_pairs=pairs, seconds=seconds)


def fit(points: Sequence[StepPoint]) -> StepCost:
    """Fits the costs by least squares of the relative errors. Raises ConfigError if a fitted cost is negative."""
    import numpy as np

    seconds = np.array([point.seconds for point in points])
    terms = np.array([(each.num_steps, each.num_tokens, each.num_positions, each.num_pairs) for each in points])
    found, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(points)), rcond=None)
    if len(points) < 4 or min(found) < 0:
        raise ConfigError(
            f"these {len(points)} measurements give no costs of a step ({found}); measure with "
            "`rayloom-engine bench step --plot FILE.svg --json FILE` on a machine without other work"
        )
    step_s, token_s, context_s, pair_s = (float(each) for each in found)
    return StepCost(step_s=step_s, token_s=token_s, context_s=context_s, pair_s=pair_s)


def points_of_sweeps(
    sweeps: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], context: int, chunk: int
) -> list[StepPoint]:
    """The measured points of the sweeps of `bench step`. `context`, `chunk`: the flags of that run."""
    decodes, prompts, tokens = (sweeps[title]["measured"] for title in ("decode", "prefill", "one decoded token"))
    return [
        *(decode_point(int(num), context, num / rate) for num, rate in decodes),
        *(prompt_point(int(length), chunk, length / rate) for length, rate in prompts),
        *(decode_point(1, int(length), milliseconds / 1e3) for length, milliseconds in tokens),
    ]


def read_cost(path: Path) -> StepCost:
    """The costs in a file that `bench step --json` wrote. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        points = points_of_sweeps(document["sweeps"], document["context"], document["chunk"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--cost {path}: {error!r}; give a file written by `rayloom-engine bench step --plot FILE.svg --json FILE`"
        ) from error
    return fit(points)
