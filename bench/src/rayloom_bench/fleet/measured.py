"""Simulated speeds of the workloads W1 to W4 beside measured speeds: the ratios, their goal and the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayloom_bench.fleet.closed_loop import ClosedLoop
from rayloom_bench.fleet.engine import EngineShape
from rayloom_bench.fleet.step_cost import StepCost
from rayloom_bench.markdown import number, spread_text, table
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_bench.spread import spread
from rayloom_bench.workload import WORKLOADS

GOAL_DEVIATION = 0.10  # goal: largest difference of a simulated speed from the measured speed, as a share of the latter


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A workload's speed in the simulation and in each round of a real engine, in output tokens per second."""

    workload: str
    simulated: float
    measured: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The simulated speed, divided by the median of the measured speeds."""
        found = spread(self.measured)
        assert found is not None
        return self.simulated / found.median

    @property
    def meets_goal(self) -> bool:
        return abs(self.ratio - 1) <= GOAL_DEVIATION


def speeds(document: Mapping[str, object]) -> dict[str, float]:
    """Workload -> output tokens per second, of a file that `rayloom-engine bench --json` wrote. Raises KeyError."""
    workloads = document["workloads"]
    assert isinstance(workloads, list)
    return {each["name"]: each["engines"][0]["output_tok_s"] for each in workloads}


def compare(cost: StepCost, rounds: Sequence[Mapping[str, float]]) -> list[Compared]:
    """Simulates all workloads with these costs. `rounds`: the measured speeds of each round."""
    shape = EngineShape(cost=cost)
    return [
        Compared(
            workload=workload.name,
            simulated=ClosedLoop(shape).output_tok_s(workload),
            measured=tuple(each[workload.name] for each in rounds),
        )
        for workload in WORKLOADS
    ]


def page(conditions: str, cost: StepCost, compared: Sequence[Compared], others_percent: Iterable[float]) -> str:
    """The text of the page below its title. `others_percent`: CPU time of other processes in each round."""
    rows = [
        (each.workload, number(each.simulated), spread_text(spread(each.measured)), f"{each.ratio:.2f}")
        for each in compared
    ]
    missed = [each.workload for each in compared if not each.meets_goal]
    result = f"MISSED in {', '.join(missed)}" if missed else "met"
    busy = max(others_percent)
    distrust = " **DISTURBED: do not quote these figures.**" if busy > DISTURBED_PERCENT else ""
    costs = (
        f"Costs fitted to the steps measured before: {1e3 * cost.step_s:.2f} ms a step, {1e6 * cost.token_s:.0f} us a "
        f"token, {1e6 * cost.context_s:.2f} us a position, {1e6 * cost.pair_s:.2f} us a pair. While the engine was "
        f"measured, other processes used up to {busy:.0f} % of the CPU time.{distrust}"
    )
    header = ("workload", "simulated, output tokens/s", "measured", "simulated / measured")
    goal = f"- Goal: simulated speeds differ from measured ones by at most {GOAL_DEVIATION:.0%}; {result}."
    return "\n\n".join((conditions, costs, table(header, rows), goal))
