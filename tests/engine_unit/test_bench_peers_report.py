"""The page of `bench peers` has the right ratios by round, limit of the machine, goals and tables, checked by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_bench.client import Failure
from rayloom_bench.peers.answers.agreement import Agreement
from rayloom_bench.peers.neighbour import NeighbourFigures
from rayloom_bench.peers.report import comparison
from rayloom_bench.peers.report.document import document
from rayloom_bench.peers.report.goals import goals, peer_checks
from rayloom_bench.peers.report.page import page
from rayloom_bench.peers.report.roofline import (
    decode_curves,
    decode_limit_tok_s,
    prefill_curves,
    prefill_limit_tok_s,
)
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.spread import Spread, spread
from rt_peers_result import COST, RATES, make_result, make_turn, make_workload


def two_rounds() -> PeersResult:
    """vLLM is the better peer in round 1 and llama.cpp in round 2."""
    return make_result(
        make_turn("rayloom", 1, {"W1": 6.0, "W3": 3.0}),
        make_turn("vllm", 1, {"W1": 4.0, "W3": 2.0}),
        make_turn("llama.cpp-bf16", 1, {"W3": 1.0}),
        make_turn("vllm", 2, {"W1": 3.0, "W3": 1.0}),
        make_turn("llama.cpp-bf16", 2, {"W3": 1.5}),
        make_turn("rayloom", 2, {"W1": 6.0, "W3": 3.0}),
    )


def by_text(found: tuple) -> dict[str, tuple[str, bool | None]]:
    return {goal.text: (goal.value, goal.is_met) for goal in found}


def test_a_ratio_is_computed_within_its_round() -> None:
    result = two_rounds()
    assert comparison.ratio(result, "rayloom", ["vllm"], "W1") == Spread(smallest=1.5, median=1.75, largest=2.0)
    # The best peer is vLLM with 2.0 in round 1 and llama.cpp with 1.5 in round 2.
    best = comparison.ratio(result, "rayloom", ["vllm", "llama.cpp-bf16"], "W3")
    assert best == Spread(smallest=1.5, median=1.75, largest=2.0)


def test_a_round_without_the_peer_has_no_ratio() -> None:
    result = two_rounds()
    result.turns = [turn for turn in result.turns if (turn.engine, turn.round_number) != ("vllm", 2)]
    assert comparison.ratio(result, "rayloom", ["vllm"], "W1") == Spread(smallest=1.5, median=1.5, largest=1.5)
    assert comparison.ratio(result, "rayloom", ["llama.cpp-bf16"], "W1") is None


@given(st.lists(st.floats(0.1, 1e6), min_size=1))
def test_a_spread_holds_its_values(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found.smallest == min(values) and found.largest == max(values)
    assert found.smallest <= found.median <= found.largest


def test_the_spread_of_nothing_is_nothing() -> None:
    assert spread([]) is None


def test_the_share_of_the_limit_is_that_of_the_workload() -> None:
    result = two_rounds()
    workload = result.workloads[0]
    # The prefill takes 8 x 2 x 40 / 2000 = 0.32 s, the heads of 2 first tokens take 2 x 2 x 10 / 2000 = 0.02 s, and 2 x
    # 2 steps of 100 / 1000 s take 0.4 s.
    assert comparison.limit_tok_s(result, workload) == pytest.approx(6 / 0.74)
    share = comparison.share_of_limit(result, "rayloom", workload)
    assert share is not None and share.median == pytest.approx(0.74)
    result.rates = None
    assert comparison.share_of_limit(result, "rayloom", workload) is None


def test_latency_is_over_the_requests_of_all_rounds() -> None:
    found = comparison.latency(two_rounds(), "vllm", "W1")
    assert found is not None
    # The requests have their first tokens at 0.5 s and end at 1.5 s and 2 s. So the gaps are 0.5 and 0.75 s, eight gaps
    # in all.
    assert (found.ttft_p50_ms, found.itl_p50_ms) == (500.0, 625.0)
    assert comparison.latency(two_rounds(), "llama.cpp-bf16", "W1") is None


def test_goals_are_met_by_the_median_and_missed_below_the_bound() -> None:
    found = by_text(goals(two_rounds()))
    assert found["W1: at least 1.35x vLLM, required"] == ("1.75x", True)
    assert found["W1: at least 1.5x vLLM"] == ("1.75x", True)
    assert found["W3: at least 1.5x the best peer, required"] == ("1.75x", True)
    assert found["W2: at least 1.5x vLLM, required"] == ("", None)
    assert found["W1: at least 0.6x the machine's limit"] == ("0.74x", True)
    assert found["start to first token: less than 2 s"] == ("1.50 s", True)
    assert found["PSS of all processes after all workloads: less than 1.5 GB"] == ("1.00 GB", True)
    assert found["W1: TTFT p50 no longer than that of the best peer"] == ("500.0 ms against 500.0 ms", True)
    slower = make_result(make_turn("rayloom", 1, {"W1": 5.0}), make_turn("vllm", 1, {"W1": 4.0}))
    found = by_text(goals(slower))
    assert found["W1: at least 1.35x vLLM, required"] == ("1.25x", False)
    assert found["W1: ITL p99 no longer than that of the best peer"] == ("350.0 ms against 500.0 ms", True)


def test_sampling_is_compared_with_greedy_decoding_of_the_same_round() -> None:
    result = make_result(make_turn("rayloom", 1, {"W1": 10.0, "W1s": 9.0}), workloads=("W1", "W1s"))
    text = "W1 with sampling: at least 0.95x greedy W1"
    assert by_text(goals(result))[text] == ("0.90x", False)


@pytest.mark.parametrize(("ours", "is_met"), [(15, False), (16, True), (20, True)])
def test_answers_are_compared_with_those_of_llama_cpp(ours: int, is_met: bool) -> None:
    agreements = {
        name: Agreement(num_equal=number, num_prompts=20, lengths=(64,) * number + (3,) * (20 - number))
        for name, number in {"rayloom": ours, "llama.cpp-bf16": 16, "rayloom-fp32": 19}.items()
    }
    found = by_text(goals(make_result(agreements=agreements)))
    text = "bf16 answers equal to float32: at least as many as those of llama.cpp in bf16"
    assert found[text] == (f"{ours} against 16", is_met)
    assert found["float32 answers equal to those of transformers: all"] == ("19 of 20", False)


def test_a_peer_far_from_its_earlier_figure_is_named() -> None:
    result = make_result(make_turn("vllm", 1, {"W1": 560.0, "W3": 47.0}))
    assert [(goal.value, goal.is_met) for goal in peer_checks(result)] == [
        ("560 tok/s, 0.98x", True),
        ("47 tok/s, 0.50x", False),
    ]


def test_the_sweeps_are_batches_by_gap_and_prompts_by_first_token() -> None:
    sweeps = (make_workload("D2", concurrency=2), make_workload("P4", num_output=1))
    turn = make_turn("rayloom", 0, {"D2": 4.0, "P4": 4.0})
    result = make_result(sweeps=sweeps, sweep_turns=[turn])
    ours, limit = decode_curves(result)
    assert (ours.label, ours.x, ours.tok_s) == ("rayloom bf16", (2,), (4.0,))  # 2 sequences, gaps of 0.5 s
    assert (limit.label, limit.x) == ("machine limit", (2,))
    (ours, limit) = prefill_curves(result)
    assert (ours.x, ours.tok_s) == ((4,), (8.0,))  # 4 tokens in 0.5 s


def test_bandwidth_limits_small_batches_and_arithmetic_large_ones() -> None:
    assert decode_limit_tok_s(1, COST, RATES) == pytest.approx(10)  # 100 bytes at 1000 bytes/s
    assert decode_limit_tok_s(4, COST, RATES) == pytest.approx(20)  # 2 x 4 x 50 operations at 2000 a second
    assert prefill_limit_tok_s(1, COST, RATES) == pytest.approx(10)
    assert prefill_limit_tok_s(100, COST, RATES) == pytest.approx(100 / 4.01)


def test_memory_of_a_process_is_the_median_of_the_rounds_and_its_growth_is_a_row() -> None:
    first = make_turn("rayloom", 1, {"W1": 6.0, "W3": 3.0})
    second = make_turn("rayloom", 2, {"W1": 6.0, "W3": 3.0})
    first.pss_after = {"W1": {"front 7": 100_000_000, "rank 0 8": 300_000_000, "rank 1 9": 200_000_000}, "W3": {}}
    second.pss_after = {"W1": {"front 17": 120_000_000, "rank 0 18": 300_000_000}, "W3": {"front 17": 160_000_000}}
    peer = make_turn("vllm", 1, {"W1": 4.0})
    result = make_result(first, second, peer)
    assert comparison.memory_bytes(result, "rayloom", "W1") == {
        "front": 110_000_000,
        "rank 0": 300_000_000,
        "rank 1": 200_000_000,
    }
    lines = page(result, has_plots=False).splitlines()
    assert "| rayloom bf16, front | 110 | 160 |" in lines
    assert "| rayloom bf16, rank 0 | 300 | - |" in lines
    assert "| rayloom bf16, all | 610 | 160 |" in lines
    assert "| vLLM bf16, all | 1000 | - |" in lines


@pytest.mark.parametrize(("beside", "is_met"), [(3.9, False), (4.0, True)])
def test_the_share_beside_a_busy_process_is_that_of_the_same_round(beside: float, is_met: bool) -> None:
    result = make_result(
        make_turn("rayloom", 1, {"W3": 9.0}, neighbour=NeighbourFigures(alone_tok_s=10.0, beside_tok_s=beside)),
        make_turn("vllm", 1, {"W3": 9.0}, neighbour=NeighbourFigures(alone_tok_s=8.0, beside_tok_s=2.0)),
        make_turn("vllm", 2, {"W3": 9.0}, neighbour=NeighbourFigures(alone_tok_s=8.0, beside_tok_s=4.0)),
        make_turn("llama.cpp-bf16", 1, {"W3": 9.0}),
    )
    text = "W3 beside a busy process: at least 0.4x its speed alone"
    assert by_text(goals(result))[text] == (f"{beside / 10:.2f}x", is_met)
    lines = page(result, has_plots=False).splitlines()
    assert "| vLLM bf16 | 8.00 | 3.00 (2.00 to 4.00) | 0.38 (0.25 to 0.50) |" in lines
    assert not any(line.startswith("| llama.cpp bf16 | 8") for line in lines)
    assert "busy process, and" not in page(two_rounds(), has_plots=False)


def test_the_page_has_every_table_with_a_row_for_each_engine() -> None:
    result = two_rounds()
    result.agreements["vllm"] = Agreement(num_equal=1, num_prompts=2, lengths=(64, 3))
    result.failures.append(Failure(name="vLLM, round 3", reason="it ended\nlog line"))
    lines = page(result, has_plots=True).splitlines()
    assert "| rayloom bf16 | 6.00 | 3.00 |" in lines
    assert "| vLLM bf16 | 3.50 (3.00 to 4.00) | 1.50 (1.00 to 2.00) |" in lines
    assert "| llama.cpp bf16 | - | 1.25 (1.00 to 1.50) |" in lines
    assert "| machine limit | 8.11 | 8.11 |" in lines
    assert "| rayloom / vLLM bf16 | 1.75x (1.50 to 2.00) | 2.25x (1.50 to 3.00) |" in lines
    assert "| rayloom / best peer | 1.75x (1.50 to 2.00) | 1.75x (1.50 to 2.00) |" in lines
    assert "| vLLM bf16 | 1.50 | 1.00 | 1 of 2 | 33.5 |" in lines
    assert "| W1 | rayloom bf16 | 500 | 500 | 250 | 250 |" in lines
    assert "- vLLM, round 3: it ended" in lines
    assert "![Output tokens per second by workload](peers-throughput.svg)" in lines
    assert "rayloom-engine bench peers" in lines and "vllm serve" in lines
    assert not any("](" in line for line in page(result, has_plots=False).splitlines())


def test_a_disturbed_run_says_so() -> None:
    calm = make_result(make_turn("rayloom", 1, {"W1": 6.0}, others_percent=5.0))
    disturbed = make_result(make_turn("rayloom", 1, {"W1": 6.0}, others_percent=6.0))
    assert "DISTURBED" not in page(calm, has_plots=False)
    assert "up to 6 % of the CPU time while an engine was measured. **DISTURBED" in page(disturbed, has_plots=False)


def test_the_document_is_json_with_every_turn() -> None:
    read = json.loads(json.dumps(document(two_rounds())))
    assert [(turn["engine"], turn["round"]) for turn in read["turns"]][:2] == [("rayloom", 1), ("vllm", 1)]
    assert read["turns"][0]["figures"]["W1"]["output_tok_s"] == pytest.approx(6.0)
    assert read["goals"][0]["is_met"] is True
