"""A result of `bench peers` with given tokens per second, for tests of its page, goals and plots."""

from __future__ import annotations

from rayloom_bench.figures import RequestRecord, summarise
from rayloom_bench.limit import MachineRates, ModelCost
from rayloom_bench.peers.result import EngineFacts, PeersResult, Turn
from rayloom_bench.workload import Workload

RATES = MachineRates(
    read_bytes_s=1000.0, fp32_flop_s=500.0, bf16_flop_s=2000.0, has_bf16_instructions=True, cpu_capability="AVX512"
)
COST = ModelCost(weight_bytes=100, num_layer_parameters=40, num_head_parameters=10)
TITLES = {"rayloom": "rayloom bf16", "vllm": "vLLM bf16", "llama.cpp-bf16": "llama.cpp bf16"}


def make_workload(name: str, **fields: int) -> Workload:
    return Workload(name=name, **{"num_requests": 2, "concurrency": 1, "num_own": 4, "num_output": 3, **fields})


def make_records(tok_s: float, *, ttft_s: float = 0.5) -> tuple[RequestRecord, ...]:
    """Two simultaneous requests of three tokens each, which together have `tok_s` tokens per second."""
    end_s = 6 / tok_s
    gap_s = (end_s - ttft_s) / 2
    arrivals_s = (ttft_s, ttft_s + gap_s, end_s)
    return tuple(
        RequestRecord(
            index=index,
            num_prompt=4,
            num_output=3,
            start_s=0.0,
            arrivals_s=arrivals_s,
            last_s=end_s,
            end_s=end_s,
        )
        for index in range(2)
    )


def make_turn(engine: str, round_number: int, tok_s_by_workload: dict[str, float], **fields: object) -> Turn:
    records = {name: make_records(tok_s) for name, tok_s in tok_s_by_workload.items()}
    turn = Turn(engine=engine, round_number=round_number, start_to_first_token_s=1.5)
    turn.records = records
    turn.figures = {name: summarise(each) for name, each in records.items()}
    turn.pss_bytes = {"front 1": 400_000_000, "core 2": 600_000_000}
    turn.pss_after = dict.fromkeys(tok_s_by_workload, turn.pss_bytes)
    for name, value in fields.items():
        setattr(turn, name, value)
    return turn


def make_result(*turns: Turn, workloads: tuple[str, ...] = ("W1", "W3"), **fields: object) -> PeersResult:
    return PeersResult(
        about={
            "processor": "A chip",
            "num_cores": 2,
            "date": "2026-01-31",
            "versions": "python 3, torch 2",
            "num_rounds": 2,
            "seed": 0,
            "scale": 1.0,
            "command": "rayloom-engine bench peers",
        },
        engines={name: EngineFacts(title=title, shown_command=f"{name} serve") for name, title in TITLES.items()},
        workloads=tuple(make_workload(name) for name in workloads),
        turns=list(turns),
        rates=RATES,
        cost=COST,
        **fields,
    )
