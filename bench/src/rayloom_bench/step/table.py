"""The table of a step: for each phase its time, its reads, its operations, and its share of the limit."""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_bench.step.cost import Cost, total
from rayloom_bench.step.limits import Limits

_HEADER = f"{'phase':18}{'ms':>9}{'share':>8}{'MB read':>9}{'MFLOP':>10}{'GB/s':>8}{'GFLOP/s':>9}{'of limit':>10}"


def table(seconds: Mapping[str, float], costs: Mapping[str, Cost], limits: Limits) -> str:
    """Returns the lines. Column `of limit`: the least seconds that the machine needs, divided by the measured ones."""
    step_s = sum(seconds.values())
    lines = [_HEADER]
    for name, phase_s in seconds.items():
        lines.append(_line(name, phase_s, step_s, costs.get(name), limits))
    lines.append(_line("step", step_s, step_s, total(list(costs.values())), limits, limit_of_step(costs, limits)))
    return "\n".join(lines)


def limit_of_step(costs: Mapping[str, Cost], limits: Limits) -> float:
    """Returns the seconds in which the machine can compute all phases, one after the other."""
    return sum(cost.limit_s(limits.read_bytes_s, limits.flop_s) for cost in costs.values())


def _line(
    name: str, phase_s: float, step_s: float, cost: Cost | None, limits: Limits, limit_s: float | None = None
) -> str:
    line = f"{name:18}{1e3 * phase_s:9.3f}{phase_s / step_s:8.1%}"
    if cost is None or phase_s == 0.0:
        return line
    limit_s = cost.limit_s(limits.read_bytes_s, limits.flop_s) if limit_s is None else limit_s
    rates = f"{cost.num_bytes / phase_s / 1e9:8.1f}{cost.num_flop / phase_s / 1e9:9.1f}{limit_s / phase_s:10.0%}"
    return f"{line}{cost.num_bytes / 1e6:9.1f}{cost.num_flop / 1e6:10.1f}{rates}"
