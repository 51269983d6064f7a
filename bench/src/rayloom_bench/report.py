"""Formats the result of a run as a table and as a JSON document."""

from __future__ import annotations

import dataclasses
import datetime
import os
import textwrap
from collections.abc import Sequence

from rayloom_bench.figures import Figures
from rayloom_bench.limit import MachineRates, ModelCost, output_tok_s, wall_s
from rayloom_bench.machine import processor_name
from rayloom_bench.result import RunResult
from rayloom_bench.workload import Workload

MAX_WIDTH = 118  # the most characters of a line, so that a table fits a terminal of 120 columns
NAME_WIDTH = 36
DISTURBED_PERCENT = 5
COLUMNS = ("out tok/s", "all tok/s", "ms/token", "TTFT p50", "p99", "ITL p50", "p99", "wall s", "ours/it")
WIDTHS = (10, 10, 9, 9, 7, 8, 7, 8, 8)

Cell = float | str | None


def machine_line(busy: float) -> str:
    """The processor, its usable cores, the date, and the share of CPU time that other processes used before the run."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    distrust = " **DISTURBED: other processes ran beside it.**" if busy > DISTURBED_PERCENT else ""
    return f"{processor_name()}, {cores} cores, {today}, {busy:.0f} % busy before the run.{distrust}"


def summary(result: RunResult) -> str:
    """Lines about the machine, the settings, the server's start and memory, and the peers."""
    about = result.about
    lines = [
        f"{about['processor']}, {about['threads']} threads, {about['busy_percent_before']:.0f} % busy before the run; "
        f"seed {about['seed']}"
    ]
    if about["scale"] != 1:
        lines.append(f"scale {about['scale']}: fewer requests than the workloads' own numbers")
    if result.rates is not None:
        rates = result.rates
        lines.append(
            f"machine: reads {rates.read_bytes_s / 1e9:.1f} GB/s; {_number(rates.fp32_flop_s / 1e9)} GFLOP/s in fp32, "
            f"{_number(rates.bf16_flop_s / 1e9)} in bf16"
            + ("" if rates.has_bf16_instructions else " (no bf16 instructions: compare with float32 too)")
        )
    if result.start_up is not None:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.start_up.phases.items())
        lines.append(
            f"start to first token: {result.start_up.second_s:.2f} s (first start {result.start_up.first_s:.2f} s; "
            f"phases of the second, s: {phases})"
        )
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.start_up.cpu_s.items())
        total_s = sum(result.start_up.cpu_s.values())
        lines.append(f"CPU time until the first token: {total_s:.2f} s ({parts})")
    if result.memory is not None:
        parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in result.memory.pss_bytes.items())
        lines.append(f"memory after {result.memory.after}: {result.memory.total_bytes / 1e9:.2f} GB PSS (MB: {parts})")
    if result.others_percent:
        shares = ", ".join(f"{share:.0f} % during {engine}" for engine, share in result.others_percent.items())
        lines.append(f"used by other processes: {shares}" + _distrust(result))
    for engine, peer in result.peers.items():
        sizes = ", ".join(f"{size / 1e9:.2f} GB after {name}" for name, size in peer.pss_bytes.items())
        lines.append(f"{engine}: version {peer.version}, loaded in {peer.load_s:.1f} s; PSS {sizes}")
    return "\n".join(textwrap.fill(line, MAX_WIDTH, subsequent_indent="  ") for line in lines)


def table(result: RunResult) -> str:
    """The figures of every workload: the server, its peers and the machine's limit, with the server's ratio to each."""
    lines = [_line("", COLUMNS), "-" * (NAME_WIDTH + sum(WIDTHS))]
    for workload in result.workloads:
        lines.append(f"{workload.name}: {workload.description}")
        ours = result.ours_tok_s(workload)
        for measured in result.measured.get(workload.name, ()):
            ratio = None if measured.engine == result.ours or ours is None else ours / measured.figures.output_tok_s
            lines.append(_line(f"  {measured.engine}", _cells(measured.figures, ratio)))
        if result.cost is not None and result.rates is not None:
            lines.append(_line("  machine limit *", _limit_cells(workload, result.cost, result.rates, ours)))
    lines.append("")
    lines.append(
        "Times in ms: ms/token = mean inter-token latency, TTFT = time to first token, ITL = gap between arrivals."
    )
    lines += _limit_footnote(result)
    return "\n".join(lines)


def document(result: RunResult) -> dict[str, object]:
    """The whole result, ready for json.dumps."""
    return {
        "version": 1,
        **result.about,
        "start_up": None if result.start_up is None else dataclasses.asdict(result.start_up),
        "memory": None if result.memory is None else dataclasses.asdict(result.memory),
        "peers": {engine: dataclasses.asdict(peer) for engine, peer in result.peers.items()},
        "others_percent": result.others_percent,
        "machine_rates": None if result.rates is None else dataclasses.asdict(result.rates),
        "model_cost": None if result.cost is None else dataclasses.asdict(result.cost),
        "failures": [dataclasses.asdict(failure) for failure in result.failures],
        "workloads": [_workload_document(result, workload) for workload in result.workloads],
    }


def _distrust(result: RunResult) -> str:
    """A warning if other processes used more than DISTURBED_PERCENT of the CPU time, else an empty string.

    The threads of a server wait for each other. So a server loses more than the CPU time that other processes use.
    """
    return " (DISTURBED: do not quote these figures)" if max(result.others_percent.values()) > DISTURBED_PERCENT else ""


def _workload_document(result: RunResult, workload: Workload) -> dict[str, object]:
    ours = result.ours_tok_s(workload)
    engines = [
        {
            "engine": measured.engine,
            **dataclasses.asdict(measured.figures),
            "ours_ratio": ours / measured.figures.output_tok_s if ours is not None else None,
            "requests": [
                {
                    "index": record.index,
                    "num_prompt": record.num_prompt,
                    "num_output": record.num_output,
                    "ttft_s": record.first_token_s,
                    "seconds": record.end_s - record.start_s,
                    "longest_gap_s": max(record.gaps_s, default=None),
                }
                for record in measured.records
            ],
        }
        for measured in result.measured.get(workload.name, ())
    ]
    limit = None
    if result.cost is not None and result.rates is not None:
        limit = {
            "output_tok_s": output_tok_s(workload, result.cost, result.rates),
            "wall_s": wall_s(workload, result.cost, result.rates),
        }
    return {**dataclasses.asdict(workload), "engines": engines, "machine_limit": limit}


def _cells(figures: Figures, ratio: float | None) -> tuple[Cell, ...]:
    return (
        figures.output_tok_s,
        figures.total_tok_s,
        figures.ms_per_token,
        figures.ttft_p50_ms,
        figures.ttft_p99_ms,
        figures.itl_p50_ms,
        figures.itl_p99_ms,
        figures.wall_s,
        None if ratio is None else f"{ratio:.2f}x",
    )


def _limit_cells(workload: Workload, cost: ModelCost, rates: MachineRates, ours: float | None) -> tuple[Cell, ...]:
    limit_tok_s = output_tok_s(workload, cost, rates)
    ratio = None if ours is None else f"{ours / limit_tok_s:.2f}x"
    return (limit_tok_s, None, None, None, None, None, None, wall_s(workload, cost, rates), ratio)


def _limit_footnote(result: RunResult) -> list[str]:
    if result.cost is None or result.rates is None:
        return []
    cost = result.cost
    rates = result.rates
    step_ms = 1e3 * cost.weight_bytes / rates.read_bytes_s
    return [
        "* decode step = max(weights / bandwidth, 2 x parameters x batch / FLOP/s), and weights / bandwidth = "
        f"{cost.weight_bytes / 1e6:.0f} MB",
        f"  / {rates.read_bytes_s / 1e9:.1f} GB/s = {step_ms:.1f} ms; prefill = 2 x tokens x layer parameters / FLOP/s "
        f"at {rates.flop_s / 1e9:.0f} GFLOP/s.",
        "  Attention and KV reads are left out, so no engine reaches it.",
    ]


def _line(name: str, cells: Sequence[Cell]) -> str:
    texts = ("" if cell is None else cell if isinstance(cell, str) else _number(cell) for cell in cells)
    return (
        f"{name:<{NAME_WIDTH}}" + "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=True))
    ).rstrip()


def _number(value: float) -> str:
    """The number without an exponent, and with one decimal below 100."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
