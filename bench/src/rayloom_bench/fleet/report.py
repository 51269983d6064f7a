"""The table and the diagrams of simulated fleets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rayloom_bench.fleet.outcome import FleetOutcome, LatencyGoal
from rayloom_bench.markdown import table
from rayloom_bench.step.sweeps import Line, Panel

_HEADER = (
    "requests/s",
    "policy",
    "prefix hits",
    "TTFT p50, p90, p99 (s)",
    "goodput (requests/s)",
    "output tok/s",
    "failures",
    "resumed",
    "lost",
    "accelerator-hours",
)


def rows_table(outcomes: Mapping[float, Sequence[FleetOutcome]], goal: LatencyGoal, num_accelerators: int) -> str:
    """Returns a Markdown table with a row for each rate and policy. `num_accelerators`: accelerators of one engine."""
    rows = []
    for rate, some in outcomes.items():
        for each in some:
            offered = rate or (len(each.finished) + each.num_lost) / each.span_s
            times = ", ".join(f"{each.ttft_s(share):.2f}" for share in (0.5, 0.9, 0.99))
            rows.append(
                (
                    f"{offered:.3g}",
                    each.policy,
                    f"{each.hit_rate:.1%}",
                    times,
                    f"{each.goodput(goal):.2f}",
                    f"{each.output_tok_s:.0f}",
                    str(each.num_failures),
                    str(each.num_resumed),
                    str(each.num_lost),
                    f"{each.engine_hours * num_accelerators:.2f}",
                )
            )
    return table(_HEADER, rows)


def panels(outcomes: Mapping[float, Sequence[FleetOutcome]], goal: LatencyGoal) -> tuple[Panel, Panel]:
    """Returns two diagrams over the request rate, with a line for each policy."""

    def lines(value: Callable[[FleetOutcome], float]) -> tuple[Line, ...]:
        policies = [each.policy for each in next(iter(outcomes.values()))]
        return tuple(
            Line(policy, tuple((rate, value(some[place])) for rate, some in outcomes.items()))
            for place, policy in enumerate(policies)
        )

    return (
        Panel(
            title="time to first token, p90",
            x_label="requests a second",
            y_label="seconds",
            is_log=True,
            lines=lines(lambda outcome: outcome.ttft_s(0.9)),
        ),
        Panel(
            title="goodput",
            x_label="requests a second",
            y_label="requests a second within the goal",
            is_log=False,
            lines=lines(lambda outcome: outcome.goodput(goal)),
        ),
    )
