"""The sweeps, compared with the machine's limit: tokens per second by batch size and by prompt length. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayloom_bench.limit import MachineRates, ModelCost, step_s
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.workload import Workload

LIMIT = "machine limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot: `x` is a batch size or a prompt length, `tok_s` tokens per second."""

    label: str
    x: tuple[int, ...]
    tok_s: tuple[float, ...]


def is_decode(workload: Workload) -> bool:
    """True for workloads of the decode sweep, False for those of the prefill sweep, whose answers have one token."""
    return workload.num_output > 1


def decode_curves(result: PeersResult) -> tuple[Curve, ...]:
    """Output tokens per second while a whole batch decodes: the batch size divided by the median gap between tokens."""
    workloads = [workload for workload in result.sweeps if is_decode(workload)]
    curves = []
    for turn in result.sweep_turns:
        found = [
            (workload.concurrency, 1e3 * workload.concurrency / gap_ms)
            for workload in workloads
            if (figures := turn.figures.get(workload.name)) is not None and (gap_ms := figures.itl_p50_ms)
        ]
        curves.append(_curve(result.engines[turn.engine].title, found))
    curves.append(_limit(result, [workload.concurrency for workload in workloads], decode_limit_tok_s))
    return tuple(curve for curve in curves if curve.x)


def prefill_curves(result: PeersResult) -> tuple[Curve, ...]:
    """Prompt tokens per second: the prompt's length divided by the median time to the first token."""
    workloads = [workload for workload in result.sweeps if not is_decode(workload)]
    curves = []
    for turn in result.sweep_turns:
        found = [
            (workload.num_prompt, 1e3 * workload.num_prompt / figures.ttft_p50_ms)
            for workload in workloads
            if (figures := turn.figures.get(workload.name)) is not None
        ]
        curves.append(_curve(result.engines[turn.engine].title, found))
    curves.append(_limit(result, [workload.num_prompt for workload in workloads], prefill_limit_tok_s))
    return tuple(curve for curve in curves if curve.x)


def decode_limit_tok_s(batch: int, cost: ModelCost, rates: MachineRates) -> float:
    """Upper bound: bandwidth limits small batches, and FLOP/s limit large batches."""
    return batch / step_s(batch, cost, rates)


def prefill_limit_tok_s(length: int, cost: ModelCost, rates: MachineRates) -> float:
    """Upper bound: the layers multiply all tokens, the head only the last token. Attention is not counted."""
    seconds = (2 * length * cost.num_layer_parameters + 2 * cost.num_head_parameters) / rates.flop_s
    return length / max(seconds, cost.weight_bytes / rates.read_bytes_s)


def _curve(label: str, points: Sequence[tuple[int, float]]) -> Curve:
    return Curve(label=label, x=tuple(x for x, _ in points), tok_s=tuple(tok_s for _, tok_s in points))


def _limit(result: PeersResult, xs: Sequence[int], bound: Callable[[int, ModelCost, MachineRates], float]) -> Curve:
    """The machine's limit at every `x`; without points if the machine was not measured."""
    if result.cost is None or result.rates is None:
        return _curve(LIMIT, ())
    return _curve(LIMIT, [(x, bound(x, result.cost, result.rates)) for x in xs])
