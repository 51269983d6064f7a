"""`rayloom-engine bench step`: where a step on the C library spends its time, and the machine's limit.

Runs a decode step of a batch and the steps of one prompt, and prints a table for each of the two. A table has a row for
each phase: its time, the bytes that it must read, its floating-point operations, and its share of the machine's limit.
The limit follows from memory bandwidth and FLOP/s, which are measured in the same run. "host" is Python's part of the
rank; scheduler and HTTP are not part of these steps. With --plot or --page, the command also measures batches of 1 to
64, prompts of 128 to 8,192 tokens, and one decoded token after 1,024 to 8,192 tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_bench.machine import busy_percent, processor_name
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_bench.settings import page_file

if TYPE_CHECKING:
    from rayloom_bench.step.cost import Cost, StepShape
    from rayloom_bench.step.limits import Limits
    from rayloom_bench.step.rank import StepRank

INSTRUCTION_SET = "RAYLOOM_CPU_ISA"
PAGE = "step.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="checkpoint; default: the engine's")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    parser.add_argument("--quantization", default="none", choices=("none", "int8"), help="form of the weights")
    parser.add_argument("--batch", type=_positive, default=16, help="sequences of the decode step (default 16)")
    parser.add_argument("--context", type=_positive, default=160, help="tokens of each decoded sequence (default 160)")
    parser.add_argument("--prefill", type=_positive, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--chunk", type=_positive, default=512, help="tokens of a prompt's step (default 512)")
    parser.add_argument("--isa", help="instruction set: avx512 or avx2; default: the best of this CPU")
    parser.add_argument("--threads", type=_positive, help="compute threads; default: all usable cores")
    parser.add_argument("--repeats", type=_positive, default=5, help="runs, of which the fastest counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="measure the sweeps, and draw them")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FOLDER",
        help=f"measure the sweeps, and write {PAGE} and a plot into this folder",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 0. Raises ConfigError or ModelError."""
    from rayloom_engine.config import EngineConfig
    from rayloom_engine.worker.start import set_threads

    target = page_file(args.page, PAGE)
    given = {"model": args.model} if args.model else {}
    config = EngineConfig(dtype=args.dtype, quantization=args.quantization, threads=args.threads, **given)
    busy = busy_percent()
    num_threads = set_threads(config)  # set before the first import of torch

    from rayloom_bench.step import limits as machine
    from rayloom_bench.step.rank import StepRank

    environ = {**os.environ, INSTRUCTION_SET: args.isa} if args.isa else os.environ
    rank = StepRank(config, num_threads, environ)
    machine_line = f"{processor_name()}, {rank.library.description}, {'int8' if rank.is_int8 else args.dtype}"
    limits = machine.measure(rank.library, rank.dtype, is_int8=rank.is_int8)
    print(
        f"{machine_line}; {busy:.0f} % busy before\n"
        f"limits: {limits.read_bytes_s / 1e9:.1f} GB/s, {limits.flop_s / 1e9:.1f} GFLOP/s\n"
    )
    tables, seconds = _tables(rank, limits, args)
    document: dict[str, object] = {
        "read_bytes_s": limits.read_bytes_s,
        "flop_s": limits.flop_s,
        "seconds": seconds,
        "context": args.context,
        "chunk": args.chunk,
    }
    if args.plot is not None or target is not None:
        from rayloom_bench.step.page import PLOT, growth, page
        from rayloom_bench.step.plot import draw
        from rayloom_bench.step.sweeps import TOKEN_PANEL, sweep

        panels = sweep(rank, limits, args.context, args.chunk, lambda line: print(line, file=sys.stderr, flush=True))
        document["sweeps"] = {panel.title: {line.label: line.points for line in panel.lines} for panel in panels}
        drawing = draw(panels, machine_line)
        print(next(growth(panel) for panel in panels if panel.title == TOKEN_PANEL))
        if args.plot is not None:
            args.plot.write_text(drawing, encoding="utf-8")
        if target is not None:
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            distrust = " **DISTURBED: do not quote these figures.**" if busy > DISTURBED_PERCENT else ""
            conditions = (
                f"{machine_line}, {today}, {busy:.0f} % busy before the run.{distrust} The machine reads "
                f"{limits.read_bytes_s / 1e9:.1f} GB/s and the library's large product computes "
                f"{limits.flop_s / 1e9:.0f} GFLOP/s."
            )
            target.write_text(page(conditions, tables, panels), encoding="utf-8")
            target.with_name(PLOT).write_text(drawing, encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _tables(
    rank: StepRank, limits: Limits, args: argparse.Namespace
) -> tuple[dict[str, str], dict[str, Mapping[str, float]]]:
    """Measures both steps and prints their tables. Returns title -> table, and title -> seconds of each phase."""
    from rayloom_bench.step.cost import phase_costs
    from rayloom_bench.step.rank import decode_step, fastest, prefill_steps
    from rayloom_bench.step.table import table

    tables: dict[str, str] = {}
    found: dict[str, Mapping[str, float]] = {}
    cases: dict[str, tuple[int, int, list[StepShape]]] = {
        f"decode, {args.batch} sequences of {args.context} tokens": (
            args.batch,
            args.context,
            [decode_step(args.batch, args.context)],
        ),
        f"prompt of {args.prefill} tokens in steps of {args.chunk}": (
            1,
            args.prefill,
            prefill_steps(args.prefill, args.chunk),
        ),
    }
    for title, (num_sequences, num_positions, steps) in cases.items():
        seconds = fastest(rank.runner(num_sequences, num_positions), steps, args.repeats)
        costs = _sum([phase_costs(rank.shape, step, rank.element_bytes) for step in steps])
        tables[title] = table(seconds, costs, limits)
        found[title] = seconds
        print(f"{title}\n{tables[title]}\n")
    return tables, found


def _sum(costs: list[dict[str, Cost]]) -> Mapping[str, Cost]:
    from rayloom_bench.step.cost import total

    return {name: total([of_step[name] for of_step in costs]) for name in costs[0]}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
