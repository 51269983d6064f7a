"""`bench simulation`: simulated speeds beside measured speeds, with a step whose time is known."""

from __future__ import annotations

import pytest

from rayloom_bench.fleet.measured import Compared, compare, page, speeds
from rayloom_bench.fleet.step_cost import StepCost

# A step takes 9.475 ms whatever it computes, so that with the host's 0.5 ms and 25 us a token, a step of one sequence
# takes 10 ms.
COST = StepCost(step_s=0.009475, token_s=1e-12, context_s=0.0)
MEASURED = {"W1": 1000.0, "W2": 1000.0, "W3": 100.0, "W4": 1000.0}


def test_a_workload_is_simulated_with_the_given_costs() -> None:
    compared = {each.workload: each for each in compare(COST, [MEASURED, MEASURED])}

    # W3: one request at a time, 128 tokens in a prompt step and 127 more steps, each 10 ms: 100 tokens per second
    assert compared["W3"].simulated == pytest.approx(100.0)
    assert compared["W3"].ratio == pytest.approx(1.0)
    assert compared["W3"].measured == (100.0, 100.0)


def test_the_median_of_the_rounds_decides_about_the_goal() -> None:
    assert Compared(workload="W1", simulated=109.0, measured=(100.0, 50.0, 101.0)).meets_goal
    assert not Compared(workload="W1", simulated=111.0, measured=(100.0, 50.0, 101.0)).meets_goal
    assert not Compared(workload="W1", simulated=89.0, measured=(100.0,)).meets_goal


def test_the_page_names_missed_workloads_and_a_disturbed_run() -> None:
    compared = [
        Compared(workload="W1", simulated=115.0, measured=(100.0,)),
        Compared(workload="W3", simulated=101.0, measured=(100.0, 98.0)),
    ]
    text = page("conditions", COST, compared, [1.0, 2.4])

    assert "| W1 | 115 | 100 | 1.15 |" in text
    assert "| W3 | 101 | 99.0 (98.0 to 100) | 1.02 |" in text
    assert "at most 10%; MISSED in W1." in text
    assert "up to 2 % of the CPU time.\n" in text
    assert "DISTURBED" in page("conditions", COST, compared, [6.0])


def test_speeds_are_read_from_the_results_of_a_bench() -> None:
    document = {"workloads": [{"name": "W1", "engines": [{"output_tok_s": 5.0}, {"output_tok_s": 6.0}]}]}
    assert speeds(document) == {"W1": 5.0}
