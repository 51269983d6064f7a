"""The bench's arithmetic on numbers that a reader can check by hand: figures, limits, the table and the document."""

import json

import pytest

from rayloom_bench.client import Failure
from rayloom_bench.figures import RequestRecord, percentile, summarise
from rayloom_bench.limit import MachineRates, ModelCost, model_cost, output_tok_s, wall_s
from rayloom_bench.machine import CpuClock, others_percent
from rayloom_bench.peer import batch_records
from rayloom_bench.report import document, summary, table
from rayloom_bench.result import Measured, Memory, Peer, RunResult, StartUp
from rayloom_bench.workload import Workload

RATES = MachineRates(
    read_bytes_s=1000.0, fp32_flop_s=2000.0, bf16_flop_s=500.0, has_bf16_instructions=False, cpu_capability="AVX2"
)
COST = ModelCost(weight_bytes=100, num_layer_parameters=40, num_head_parameters=10)
WORKLOAD = Workload(name="S", num_requests=4, concurrency=2, num_own=10, num_output=5)


def make_record(
    index: int = 0, *, start_s: float = 0.0, arrivals_s: tuple[float, ...] = (1.0, 2.0, 4.0)
) -> RequestRecord:
    return RequestRecord(
        index=index,
        num_prompt=10,
        num_output=3,
        start_s=start_s,
        arrivals_s=arrivals_s,
        last_s=arrivals_s[-1],
        end_s=arrivals_s[-1],
    )


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([7.0], 0.99) == 7.0


def test_figures_of_two_requests() -> None:
    figures = summarise([make_record(), make_record(1, start_s=1.0, arrivals_s=(4.0, 5.0, 6.0))])
    assert (figures.num_requests, figures.prompt_tokens, figures.output_tokens) == (2, 20, 6)
    assert figures.wall_s == 6.0  # from 0 to 6
    assert figures.output_tok_s == 1.0
    assert figures.total_tok_s == pytest.approx(26 / 6)
    assert figures.ms_per_token == 1250.0  # (3 + 2) s for the 2 + 2 tokens after the first
    assert figures.ttft_p50_ms == 2000.0  # between 1 s and 3 s
    assert figures.ttft_p99_ms == pytest.approx(2980.0)
    assert figures.itl_p50_ms == 1000.0  # gaps 1, 2, 1, 1
    assert figures.itl_p99_ms == pytest.approx(1970.0)


def test_tokens_that_arrive_together_count_in_the_mean() -> None:
    figures = summarise([make_record(arrivals_s=(1.0, 2.0))])  # three tokens in two arrivals
    assert figures.ms_per_token == 500.0
    assert figures.itl_p50_ms == 1000.0


def test_one_token_has_no_inter_token_latency() -> None:
    record = RequestRecord(index=0, num_prompt=1, num_output=1, start_s=0, arrivals_s=(1.0,), last_s=1.0, end_s=1.0)
    figures = summarise([record])
    assert (figures.ms_per_token, figures.itl_p50_ms, figures.itl_p99_ms) == (None, None, None)


def test_static_batches_become_a_record_for_each_request() -> None:
    batches = [
        {"start_s": [0.0], "steps_s": [1.0, 2.0], "end_s": [2.0]},
        {"start_s": [2.0], "steps_s": [4.0, 5.0], "end_s": [5.0]},
    ]
    records = batch_records(WORKLOAD, [(1,), (2, 3), (4,)], batches)
    assert [(r.index, r.num_prompt, r.num_output, r.start_s, r.end_s) for r in records] == [
        (0, 1, 2, 0.0, 2.0),
        (1, 2, 2, 0.0, 2.0),
        (2, 1, 2, 2.0, 5.0),
    ]


def test_untied_embedding_is_looked_up_and_not_read() -> None:
    assert model_cost(num_parameters=50, num_head_parameters=10, element_bytes=2, is_tied=True) == COST
    untied = model_cost(num_parameters=60, num_head_parameters=10, element_bytes=2, is_tied=False)
    assert untied == COST


def test_machine_limit_by_hand() -> None:
    # The prefill of 40 tokens takes 40 x 2 x 40 / 2000 = 1.6 s. The heads of 4 first tokens take 4 x 2 x 10 / 2000 =
    # 0.04 s. A decode step takes max(100 / 1000, 2 x 2 x 50 / 2000) = 0.1 s, so 2 batches x 4 steps take 0.8 s.
    assert wall_s(WORKLOAD, COST, RATES) == pytest.approx(2.44)
    assert output_tok_s(WORKLOAD, COST, RATES) == pytest.approx(20 / 2.44)


def test_shared_prefix_is_computed_once_in_the_limit() -> None:
    shared = Workload(name="S", num_requests=4, concurrency=2, num_shared=20, num_own=10, num_output=5)
    assert wall_s(shared, COST, RATES) - wall_s(WORKLOAD, COST, RATES) == pytest.approx(20 * 2 * 40 / 2000)


def make_result() -> RunResult:
    result = RunResult(
        about={
            "processor": "A chip",
            "threads": 2,
            "busy_percent_before": 3.4,
            "seed": 5,
            "scale": 0.5,
            "versions": {"python": "3"},
        },
        workloads=(WORKLOAD,),
        ours="rayloom bf16",
        start_up=StartUp(
            first_s=12.0,
            second_s=4.256,
            phases={"import": 2.0, "load": 0.51},
            cpu_s={"front 12": 0.5, "core 13": 2.25},
        ),
        memory=Memory(after="S", pss_bytes={"front 12": 100_000_000, "core 13": 1_100_000_000}),
        others_percent={"rayloom bf16": 2.0, "transformers bf16": 31.0},
        rates=RATES,
        cost=COST,
        peers={"transformers bf16": Peer(load_s=1.0, version="5.0", pss_bytes={"S": 1_500_000_000})},
    )
    ours, theirs = (make_record(),), (make_record(arrivals_s=(2.0, 4.0, 8.0)),)
    result.add(WORKLOAD, Measured(engine="rayloom bf16", figures=summarise(ours), records=ours))
    result.add(WORKLOAD, Measured(engine="transformers bf16", figures=summarise(theirs), records=theirs))
    return result


def test_table_has_a_row_for_each_engine_with_our_ratio() -> None:
    text = table(make_result())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[2] == "S: 4 requests, 2 at a time, 10 in / 5 out"
    assert lines[3].split() == ["rayloom", "bf16", "0.8", "3.2", "1500", "1000", "1000", "1500", "1990", "4.0"]
    assert lines[4].split()[-1] == "2.00x"  # 0.75 tokens a second, twice 0.375
    assert lines[5].split() == ["machine", "limit", "*", "8.2", "2.4", "0.09x"]


def test_summary_has_the_machine_the_start_and_the_memory() -> None:
    wrapped = summary(make_result())
    assert max(map(len, wrapped.splitlines())) <= 120
    text = wrapped.replace("\n  ", " ")
    assert "A chip, 2 threads, 3 % busy before the run; seed 5" in text
    assert "scale 0.5" in text
    assert "used by other processes: 2 % during rayloom bf16, 31 % during transformers bf16 (DISTURBED" in text
    assert "no bf16 instructions" in text
    assert "start to first token: 4.26 s (first start 12.00 s" in text
    assert "CPU time until the first token: 2.75 s (front 12 0.50, core 13 2.25)" in text
    assert "memory after S: 1.20 GB PSS (MB: front 12 100, core 13 1100)" in text


def test_document_is_json_and_holds_every_request() -> None:
    result = make_result()
    result.failures.append(Failure(name="S request 1", reason="HTTP 500"))
    read = json.loads(json.dumps(document(result)))
    (workload,) = read["workloads"]
    assert [engine["ours_ratio"] for engine in workload["engines"]] == [1.0, 2.0]
    assert workload["engines"][0]["requests"] == [
        {"index": 0, "num_prompt": 10, "num_output": 3, "ttft_s": 1.0, "seconds": 4.0, "longest_gap_s": 2.0}
    ]
    assert workload["machine_limit"]["wall_s"] == pytest.approx(2.44)
    assert read["failures"] == [{"name": "S request 1", "reason": "HTTP 500"}]


def test_share_of_others_is_busy_time_that_is_not_ours() -> None:
    before = CpuClock(wall_s=0.0, busy_s=100.0, own_s=10.0)
    after = CpuClock(wall_s=10.0, busy_s=118.0, own_s=24.0)
    assert others_percent(before, after, num_cores=2) == 20.0  # 18 s busy, 14 s ours, of 20 s
    assert others_percent(before, CpuClock(wall_s=10.0, busy_s=110.0, own_s=21.0), num_cores=2) == 0.0


def test_workload_without_our_figures_has_no_ratio() -> None:
    result = make_result()
    del result.measured["S"][0]
    assert "x" not in table(result).splitlines()[3].split()[-1]
