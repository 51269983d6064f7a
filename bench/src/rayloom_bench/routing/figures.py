"""Figures of a choice under a load, the best possible share of hits, and the table of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayloom_bench.figures import percentile
from rayloom_bench.fleet.arrivals import Arrival
from rayloom_bench.markdown import table
from rayloom_bench.routing.choices import FEWEST, GATEWAY, ROUND_ROBIN
from rayloom_bench.routing.load import RoutedLoad

GOAL_OF_BEST = 0.95  # goal: least share of the best possible hits that the gateway must reach
GOAL_FASTER = 3.0  # goal: round robin's p90 of the time to the first token, divided by the gateway's


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    hit_rate: float  # share of the prompts' tokens that were cached
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    num_answered: int
    failures: tuple[str, ...]


def figures_of(load: RoutedLoad) -> ChoiceFigures:
    """The figures of a load with at least one answer."""
    times = [each.ttft_s for each in load.answered]
    return ChoiceFigures(
        hit_rate=sum(each.num_cached for each in load.answered) / sum(each.num_prompt for each in load.answered),
        ttft_p50_s=percentile(times, 0.5),
        ttft_p90_s=percentile(times, 0.9),
        ttft_p99_s=percentile(times, 0.99),
        num_answered=len(times),
        failures=load.failures,
    )


def best_hit_rate(arrivals: Sequence[Arrival], num_warm_up: int = 0) -> float:
    """The share of tokens that an infinite cache would hold: all tokens before the first new segment of a prompt.

    Tokens of the first `num_warm_up` prompts are not counted, but they are in the cache afterwards.

    A prefix counts as cached when its first request arrives, although it is not computed yet.
    """
    seen: set[int] = set()
    hits = 0
    for number, arrival in enumerate(arrivals):
        for segment in arrival.prompt:
            if segment.text not in seen:
                seen.add(segment.text)
                break
            hits += segment.num_tokens if number >= num_warm_up else 0
    return hits / sum(arrival.num_prompt for arrival in arrivals[num_warm_up:])


def figures_table(found: Mapping[str, ChoiceFigures], best: float) -> str:
    header = ("choice", "prefix hits", "of the best possible", "TTFT p50, p90, p99", "answered", "failed")
    rows = [
        (
            name,
            f"{each.hit_rate:.1%}",
            f"{each.hit_rate / best:.0%}",
            f"{each.ttft_p50_s:.2f}, {each.ttft_p90_s:.2f}, {each.ttft_p99_s:.2f} s",
            str(each.num_answered),
            str(len(each.failures)),
        )
        for name, each in found.items()
    ]
    return table(header, rows)


def verdicts(found: Mapping[str, ChoiceFigures], best: float) -> list[str]:
    """A line for each goal."""
    gateway = found[GATEWAY]
    share = gateway.hit_rate / best
    faster = {name: found[name].ttft_p90_s / gateway.ttft_p90_s for name in (ROUND_ROBIN, FEWEST)}
    return [
        f"- Goal: at least {GOAL_OF_BEST:.0%} of the best possible hits; {share:.1%}, {_met(share >= GOAL_OF_BEST)}.",
        f"- Goal: TTFT p90 at least {GOAL_FASTER:g} times better than with round robin; {faster[ROUND_ROBIN]:.1f} "
        f"times, {_met(faster[ROUND_ROBIN] >= GOAL_FASTER)}. Than with fewest requests: {faster[FEWEST]:.1f} times.",
    ]


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
