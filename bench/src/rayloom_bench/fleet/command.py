"""`rayloom-bench fleet`: plans a fleet of engines in virtual time, with the real scheduler and the real router.

Requests come from a generator fitted to a production trace, or from a trace file. Each routing policy serves the same
requests. The printed table has a row for each policy and rate. A cost model gives the time of a step, by default the
model of SmolLM2-135M on 2 cores. `rayloom-engine bench step --plot FILE.svg --json FILE` measures other costs for
--cost.

  rayloom-bench fleet --traffic chat --engines 4 --rate 4,8 --seconds 300
  rayloom-bench fleet --traffic long-chat --divisor 12 --engines 8 --rate 4 --mean-hours-between-failures 0.5
  rayloom-bench fleet --trace azure_conv_2023.csv.gz --engines 4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_bench.settings import positive
from rayloom_engine.errors import ConfigError

if TYPE_CHECKING:
    from rayloom_bench.fleet.arrivals import Arrival
    from rayloom_bench.fleet.engine import EngineShape
    from rayloom_bench.fleet.outcome import FleetOutcome, LatencyGoal
    from rayloom_bench.fleet.simulation import FleetSettings

_TRAFFIC = ("chat", "code", "long-chat", "shared-prefixes")
_POLICIES = "round-robin,least-loaded,by-tokens"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    load = parser.add_argument_group("requests")
    load.add_argument("--traffic", choices=_TRAFFIC, default="chat", help="generator (default chat)")
    load.add_argument("--trace", type=Path, metavar="FILE", help="requests of this file: .csv or .jsonl, also as .gz")
    load.add_argument("--rate", default="4", help="requests a second, or several separated by commas (default 4)")
    load.add_argument("--seconds", type=float, default=300.0, help="length of generated traffic (default 300)")
    load.add_argument("--divisor", type=float, default=1.0, help="divides all lengths, for a small context (default 1)")
    load.add_argument("--seed", type=int, default=0, help="seed of traffic and failures (default 0)")

    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--engines", type=int, default=2, help="engines (default 2)")
    fleet.add_argument(
        "--accelerators", type=int, default=1, help="accelerators, or CPU nodes, of an engine (default 1)"
    )
    fleet.add_argument("--policies", default=_POLICIES, help=f"separated by commas (default {_POLICIES})")
    fleet.add_argument("--mean-hours-between-failures", type=float, help="of one engine; default: no engine fails")
    fleet.add_argument("--start-seconds", type=float, default=30.0, help="until a new engine serves (default 30)")
    fleet.add_argument("--no-resume", action="store_true", help="requests of a lost engine are lost")

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--cost", type=Path, metavar="FILE", help="figures of `rayloom-engine bench step --plot --json`"
    )
    engine.add_argument("--kv-blocks", type=int, default=4096, help="KV blocks of 16 tokens (default 4096)")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="as the engine's setting (default 64)")
    engine.add_argument("--max-num-batched-tokens", type=int, default=512, help="the same (default 512)")
    engine.add_argument("--max-model-len", type=int, default=8192, help="the same (default 8192)")

    output = parser.add_argument_group("output")
    output.add_argument("--goal-ttft", type=float, default=1.0, help="seconds, for the goodput (default 1)")
    output.add_argument("--goal-itl", type=float, default=0.1, help="mean seconds between tokens (default 0.1)")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    output.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw TTFT and goodput by rate")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints. Returns 0. Raises ConfigError."""
    from rayloom_bench.fleet.outcome import LatencyGoal
    from rayloom_bench.fleet.policies import POLICIES
    from rayloom_bench.fleet.report import panels, rows_table
    from rayloom_bench.fleet.simulation import Fleet
    from rayloom_bench.step.plot import draw

    names = [name.strip() for name in args.policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError(f"--policies: {', '.join(unknown)} given; allowed are {', '.join(POLICIES)}")
    goal = LatencyGoal(ttft_s=args.goal_ttft, itl_s=args.goal_itl)
    settings = _settings(args)
    outcomes: dict[float, list[FleetOutcome]] = {}
    for rate in _rates(args):
        for name in names:
            outcome = Fleet(settings, POLICIES[name](), _arrivals(args, rate)).run(name)
            outcomes.setdefault(rate, []).append(outcome)
            print(f"{rate:g}/s, {name}: {len(outcome.finished)} requests", file=sys.stderr, flush=True)
    print(rows_table(outcomes, goal, args.accelerators))
    if args.json is not None:
        document = {str(rate): [_figures(each, goal) for each in some] for rate, some in outcomes.items()}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        source = args.trace.name if args.trace is not None else args.traffic
        title = f"{args.engines} engines, {source}, goal: first token in {goal.ttft_s:g} s"
        args.plot.write_text(draw(panels(outcomes, goal), title), encoding="utf-8")
    return 0


def _rates(args: argparse.Namespace) -> list[float]:
    """Requests a second of each run; 0 for a trace file, which has its own rate."""
    if args.trace is not None:
        return [0.0]
    try:
        rates = [float(rate) for rate in args.rate.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise ConfigError(f"--rate: {args.rate!r} given; give a positive number, or several separated by commas")
    return rates


def _arrivals(args: argparse.Namespace, rate: float) -> Iterator[Arrival]:
    from rayloom_bench.fleet.trace_files import read_trace
    from rayloom_bench.fleet.traffic import TRAFFIC, SharedPrefixes, generate, generate_shared

    if args.divisor < 1:
        raise ConfigError(f"--divisor: {args.divisor:g} given; it must be at least 1")
    if args.trace is not None:
        return iter(read_trace(args.trace, divisor=args.divisor))
    if args.traffic == "shared-prefixes":
        return generate_shared(SharedPrefixes(rate=rate), num_requests=round(rate * args.seconds), seed=args.seed)
    traffic = TRAFFIC[args.traffic]
    return generate(traffic, rate=rate, seconds=args.seconds, divisor=args.divisor, seed=args.seed)


def _settings(args: argparse.Namespace) -> FleetSettings:
    from rayloom_bench.fleet.simulation import FleetSettings

    hours = args.mean_hours_between_failures
    if hours is not None and hours <= 0:
        raise ConfigError(f"--mean-hours-between-failures: {hours:g} given; it must be more than 0")
    return FleetSettings(
        shape=_shape(args),
        num_engines=positive("--engines", args.engines) or 1,
        start_s=args.start_seconds,
        mean_s_between_failures=None if hours is None else 3600 * hours,
        resumes=not args.no_resume,
        seed=args.seed,
    )


def _shape(args: argparse.Namespace) -> EngineShape:
    from rayloom_bench.fleet.engine import EngineShape
    from rayloom_bench.fleet.step_cost import SMOLLM2_2_CORES, read_cost
    from rayloom_engine.config import BLOCK_SIZE

    for flag in ("kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "accelerators"):
        positive("--" + flag.replace("_", "-"), getattr(args, flag))
    if args.max_model_len > args.kv_blocks * BLOCK_SIZE:
        raise ConfigError(
            f"--kv-blocks: {args.kv_blocks} blocks hold {args.kv_blocks * BLOCK_SIZE} tokens, fewer than "
            f"--max-model-len {args.max_model_len}; give more blocks or a smaller context"
        )
    return EngineShape(
        cost=SMOLLM2_2_CORES if args.cost is None else read_cost(args.cost),
        num_kv_blocks=args.kv_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
    )


def _figures(outcome: FleetOutcome, goal: LatencyGoal) -> dict[str, object]:
    figures = asdict(outcome)
    figures["finished"] = len(outcome.finished)
    return {
        **figures,
        "hit_rate": outcome.hit_rate,
        "output_tok_s": outcome.output_tok_s,
        "goodput": outcome.goodput(goal),
        "ttft_s": {share: outcome.ttft_s(share) for share in (0.5, 0.9, 0.99)},
    }
