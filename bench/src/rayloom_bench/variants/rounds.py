"""Starts each variant of this engine once a round, and measures one workload on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil

from rayloom_bench.client import Failure, run_workload
from rayloom_bench.figures import summarise
from rayloom_bench.machine import CpuClock, others_percent
from rayloom_bench.server import Server, ServerFailed, running_server
from rayloom_bench.workload import Workload, token_prompts

START_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to start `rayloom-engine serve`."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The figures of one variant in one round."""

    output_tok_s: float
    communication: float  # share of wall time in sums, gathers and waits for other ranks; mean over the ranks
    others_percent: float  # share of CPU time that other processes used


@dataclass(slots=True)
class VariantResult:
    """`samples`: variant -> round -> its figures. A variant without figures in a round has a failure instead."""

    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def tok_s(self, variant: str) -> dict[int, float]:
        """Round -> output tokens per second."""
        return {number: sample.output_tok_s for number, sample in self.samples.get(variant, {}).items()}

    @property
    def most_disturbed_percent(self) -> float:
        """The largest share of CPU time that other processes used while a variant was measured."""
        return max((each.others_percent for found in self.samples.values() for each in found.values()), default=0.0)


def measure_variants(
    variants: Sequence[Variant],
    workload: Workload,
    *,
    num_rounds: int,
    seed: int,
    vocab_size: int,
    log: Callable[[str], object],
) -> VariantResult:
    """Measures every variant once a round. Each round begins with another variant and has prompts of its own."""
    result = VariantResult(samples={variant.name: {} for variant in variants})
    for number in range(1, num_rounds + 1):
        for position in range(len(variants)):
            variant = variants[(number - 1 + position) % len(variants)]
            log(f"round {number} of {num_rounds}: {variant.name}")
            try:
                with running_server(variant.flags) as server:
                    found = _measure(server, workload, seed + number, vocab_size)
            except ServerFailed as error:
                found = [Failure(name=f"{variant.name}, round {number}", reason=str(error))]
            if isinstance(found, Sample):
                result.samples[variant.name][number] = found
            else:
                result.failures += found
    return result


def _measure(server: Server, workload: Workload, seed: int, vocab_size: int) -> Sample | list[Failure]:
    server.wait_ready(START_S)
    endpoint = server.endpoint()
    warm_up = workload.warm_up()
    prompts = token_prompts(warm_up, seed=seed, vocab_size=vocab_size, purpose="warm-up")
    outcome = run_workload(endpoint, warm_up, prompts, label="warm-up")
    if outcome.failures:
        return list(outcome.failures)
    before_s = _communication_s(server)
    clock, cpu_s = CpuClock.read(), server.cpu_seconds()
    outcome = run_workload(endpoint, workload, token_prompts(workload, seed=seed, vocab_size=vocab_size))
    if outcome.failures:
        return list(outcome.failures)
    after = CpuClock.read()
    # `after` is read while the server runs. An ended server would be an ended descendant, whose CPU time is in `own_s`.
    # The next line would then count this time twice.
    after = replace(after, own_s=after.own_s + server.cpu_seconds() - cpu_s)
    figures = summarise(outcome.records)
    return Sample(
        output_tok_s=figures.output_tok_s,
        communication=(_communication_s(server) - before_s) / figures.wall_s,
        others_percent=others_percent(clock, after, psutil.cpu_count() or 1),
    )


def _communication_s(server: Server) -> float:
    """Seconds of communication of a rank since its start: the mean over all ranks."""
    return statistics.mean(rank.communication_seconds for rank in server.status().ranks)
