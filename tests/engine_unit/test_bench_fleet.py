"""Fleets in virtual time: costs of steps, single engines checked by hand, failures, and the routing policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloom_bench.__main__ import main
from rayloom_bench.fleet.arrivals import Arrival, Segment
from rayloom_bench.fleet.closed_loop import ClosedLoop
from rayloom_bench.fleet.engine import EngineShape
from rayloom_bench.fleet.outcome import FleetOutcome, LatencyGoal
from rayloom_bench.fleet.policies import POLICIES
from rayloom_bench.fleet.simulation import Fleet, FleetSettings
from rayloom_bench.fleet.step_cost import SMOLLM2_2_CORES, StepCost, decode_point, fit, prompt_point
from rayloom_bench.fleet.traffic import TRAFFIC, SharedPrefixes, generate, generate_shared
from rayloom_bench.workload import Workload
from rayloom_engine.core.step import SlotStep
from rayloom_engine.errors import ConfigError
from rt_fleet import best_hit_tokens, points_of_page

ROOT = Path(__file__).resolve().parents[2]
# A step takes 10 ms, a token 1 ms, and nothing else takes time.
PLAIN = EngineShape(
    cost=StepCost(step_s=0.010, token_s=0.001, context_s=0.0), host_s=0.0, host_token_s=0.0, num_kv_blocks=1024
)


def run(settings: FleetSettings, arrivals: list[Arrival], policy: str = "by-tokens") -> FleetOutcome:
    return Fleet(settings, POLICIES[policy](), arrivals).run(policy)


def prompt(text: int, num_tokens: int, at_s: float = 0.0, num_output: int = 4) -> Arrival:
    return Arrival(at_s=at_s, prompt=(Segment(text, num_tokens),), num_output=num_output)


def test_seconds_of_a_step_are_the_sum_of_its_parts() -> None:
    cost = StepCost(step_s=1.0, token_s=0.1, context_s=0.01, pair_s=0.001)
    decode = SlotStep(slot=0, start=99, num_tokens=1)
    chunk = SlotStep(slot=1, start=10, num_tokens=20)

    assert cost.seconds([decode], 100) == pytest.approx(1.0 + 0.1 + 100 * 0.01)
    assert cost.seconds([decode, chunk], 1000) == pytest.approx(1.0 + 21 * 0.1 + 100 * 0.01 + 20 * 20 * 0.001)
    # Two sequences that share all but 16 positions read the shared positions once.
    assert cost.seconds([decode, decode], 116) == pytest.approx(1.0 + 0.2 + 116 * 0.01)


def test_a_fit_finds_the_costs_that_made_the_points() -> None:
    cost = StepCost(step_s=0.006, token_s=0.0002, context_s=1e-6, pair_s=1e-7)
    points = [
        *(decode_point(num, 160, 0.006 + num * 0.0002 + num * 160e-6) for num in (1, 4, 16)),
        prompt_point(512, 512, 0.006 + 512 * 0.0002 + 512 * 256 * 1e-7),
        prompt_point(1024, 512, 2 * 0.006 + 1024 * 0.0002 + (512 * 256 + 512 * 768) * 1e-7),
    ]
    found = fit(points)

    assert (found.step_s, found.token_s, found.context_s, found.pair_s) == pytest.approx(
        (cost.step_s, cost.token_s, cost.context_s, cost.pair_s)
    )
    with pytest.raises(ConfigError, match="bench step"):
        fit(points[:3])


def test_the_default_costs_are_those_of_the_measured_page() -> None:
    page = (ROOT / "docs/benchmarks/step.md").read_text(encoding="utf-8")
    points = points_of_page(page)
    found = fit(points)

    assert len(points) == 7 + 7 + 5
    for name in ("step_s", "token_s", "context_s", "pair_s"):
        assert getattr(SMOLLM2_2_CORES, name) == pytest.approx(getattr(found, name), rel=1e-3)
    for point in points:
        seconds = (
            found.step_s * point.num_steps
            + found.token_s * point.num_tokens
            + found.context_s * point.num_positions
            + found.pair_s * point.num_pairs
        )
        assert seconds == pytest.approx(point.seconds, rel=0.11)


def test_times_of_one_engine_can_be_checked_by_hand() -> None:
    outcome = run(FleetSettings(shape=PLAIN, num_engines=1), [prompt(1, 100)])

    (request,) = outcome.finished
    assert request.ttft_s == pytest.approx(0.110)  # 10 ms + 100 tokens
    assert request.itl_s == pytest.approx(0.011)
    assert outcome.span_s == pytest.approx(0.110 + 3 * 0.011)
    assert outcome.goodput(LatencyGoal(ttft_s=0.2)) == pytest.approx(1 / outcome.span_s)
    assert outcome.goodput(LatencyGoal(ttft_s=0.1)) == 0.0


def test_a_repeated_prompt_goes_to_the_engine_that_has_its_blocks() -> None:
    arrivals = [prompt(text, 161, at_s=at_s) for at_s in (0.0, 5.0, 10.0) for text in range(8)]
    outcome = run(FleetSettings(shape=PLAIN, num_engines=4), arrivals)

    assert outcome.prefix_hits == 2 * 8 * 160


def test_waiting_requests_spread_over_engines() -> None:
    outcome = run(FleetSettings(shape=PLAIN, num_engines=4), [prompt(text, 400) for text in range(4)])

    assert {round(request.ttft_s, 3) for request in outcome.finished} == {0.410}


def test_a_lost_engine_loses_no_request_if_requests_resume_and_all_of_its_own_if_not() -> None:
    arrivals = list(generate(TRAFFIC["chat"], rate=6.0, seconds=25.0, divisor=4.0, seed=3))
    shape = EngineShape(cost=SMOLLM2_2_CORES)
    failing = {"shape": shape, "num_engines": 3, "mean_s_between_failures": 8.0, "start_s": 2.0}
    for policy in POLICIES:
        resumed = run(FleetSettings(**failing), arrivals, policy)
        lost = run(FleetSettings(**failing, resumes=False), arrivals, policy)

        assert resumed.num_failures > 3
        assert (len(resumed.finished), resumed.num_lost) == (len(arrivals), 0)
        assert resumed.num_resumed > 0
        assert lost.num_lost > 0
        assert len(lost.finished) + lost.num_lost == len(arrivals)
        wanted = sorted(arrival.num_output for arrival in arrivals)
        assert sorted(request.num_output for request in resumed.finished) == wanted


def test_a_full_queue_refuses() -> None:
    shape = EngineShape(cost=PLAIN.cost, max_num_seqs=1, max_queued=2)
    outcome = run(FleetSettings(shape=shape, num_engines=1), [prompt(number, 100) for number in range(6)])

    assert len(outcome.finished) + outcome.num_lost == 6
    # The first request runs at once. When its step ends, only two of the other five requests fit into the queue.
    assert outcome.num_lost == 3


def test_shared_prefixes_are_found_nearly_as_often_as_possible() -> None:
    """There are two engines and 24 prefixes of 1,024 tokens, drawn by Zipf's law.

    The cache of an engine holds 14 prefixes.
    """
    arrivals = list(generate_shared(SharedPrefixes(rate=6.0), num_requests=800, seed=1))
    num_running = 16
    blocks = 14 * 1024 // 16 + num_running * 4  # 14 prefixes, and the questions and answers of 16 running requests
    shape = EngineShape(cost=SMOLLM2_2_CORES, num_kv_blocks=blocks, max_num_seqs=num_running, max_model_len=2048)
    best = best_hit_tokens(arrivals, 16) / sum(arrival.num_prompt for arrival in arrivals)
    ours, turns, least = (
        run(FleetSettings(shape=shape, num_engines=2), arrivals, policy)
        for policy in ("by-tokens", "round-robin", "least-loaded")
    )

    assert ours.hit_rate >= 0.95 * best
    assert max(turns.hit_rate, least.hit_rate) < 0.85 * best
    assert 3 * ours.ttft_s(0.9) < min(turns.ttft_s(0.9), least.ttft_s(0.9))


def test_work_and_not_requests_is_balanced() -> None:
    arrivals = list(generate(TRAFFIC["chat"], rate=7.0, seconds=25.0, divisor=2.0, seed=1))
    settings = FleetSettings(shape=EngineShape(cost=SMOLLM2_2_CORES), num_engines=4)
    ours, turns, least = (run(settings, arrivals, each) for each in ("by-tokens", "round-robin", "least-loaded"))

    assert ours.goodput(LatencyGoal()) > least.goodput(LatencyGoal()) > turns.goodput(LatencyGoal())
    assert ours.ttft_s(0.5) < least.ttft_s(0.5) < turns.ttft_s(0.5)


def test_a_closed_loop_counts_the_tokens_of_a_workload() -> None:
    workload = Workload(name="W", num_requests=4, concurrency=1, num_own=100, num_output=11)

    # 110 ms for the prompt and the first token, 10 x 11 ms for the other tokens.
    assert ClosedLoop(PLAIN).output_tok_s(workload) == pytest.approx(11 / 0.220)


def test_the_command_prints_a_row_for_each_policy_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "fleet.json", tmp_path / "fleet.svg"
    flags = f"fleet --rate 1,2 --seconds 5 --divisor 8 --json {figures} --plot {plot}"

    assert main(flags.split()) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0].strip("| "), row[1]) for row in rows] == [
        (rate, policy) for rate in ("1", "2") for policy in ("round-robin", "least-loaded", "by-tokens")
    ]
    document = json.loads(figures.read_text())
    assert document["2.0"][2]["num_lost"] == 0
    assert plot.read_text().count("<polyline") == 6


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--rate 0", "--rate"),
        ("--policies best", "round-robin"),
        ("--kv-blocks 10", "--max-model-len"),
        ("--cost no.json", "bench step"),
        ("--trace no.csv", "ContextTokens"),
        ("--mean-hours-between-failures 0", "more than 0"),
        ("--divisor 0", "--divisor"),
    ],
)
def test_a_wrong_flag_is_named(flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", *flags.split()]) == 2
    assert text in capsys.readouterr().err
