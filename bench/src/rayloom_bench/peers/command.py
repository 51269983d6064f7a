"""`rayloom-engine bench peers`: this engine, vLLM and llama.cpp, compared and measured in turn on one machine.

If the peers are not in the cache, installs them there (about 5 GB and twenty minutes). Then compares greedy answers.
Then measures every workload on every engine in each round. Prints the page, and with --page writes it as peers.md, with
plots, into a folder. The exit code is 1 if an engine or a request failed; missed goals do not change it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_bench.command import exit_in_order
from rayloom_bench.peers.engines.shown_command import shown
from rayloom_bench.peers.names import ALL, parse_engines
from rayloom_bench.peers.settings import PeersSettings
from rayloom_bench.peers.workloads import COMPARED, DECODE_SWEEP, PREFILL_SWEEP
from rayloom_bench.workload import parse_workloads
from rayloom_engine.errors import EngineError

if TYPE_CHECKING:
    from rayloom_bench.peers.engines.contestants import Contestant
    from rayloom_bench.peers.result import PeersResult

PAGE = "peers.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines", default=",".join(ALL), help=f"engines, separated by commas; default: {','.join(ALL)}"
    )
    names = ",".join(workload.name for workload in COMPARED)
    parser.add_argument("--workloads", default=names, help=f"workloads, separated by commas; default: {names}")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each engine that are measured (default 5)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the requests, rounded up to a whole batch"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.add_argument("--no-sweep", action="store_true", help="measure no batch sizes and prompt lengths")
    parser.add_argument("--no-answers", action="store_true", help="do not compare greedy answers")
    parser.add_argument(
        "--neighbour-seconds",
        type=float,
        default=6.0,
        metavar="S",
        help="in each round, seconds of one stream beside a busy process, and as many without it (default 6; 0: none)",
    )
    parser.add_argument("--install-only", action="store_true", help="install the peers and measure nothing")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} and its plots into this folder")
    parser.add_argument("--no-plots", action="store_true", help="write the page without plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Installs, measures and prints. Returns 1 if an engine or a request failed, else 0. Raises ConfigError."""
    settings = parse_settings(args, sys.argv[1:])
    previous = signal.signal(signal.SIGTERM, exit_in_order)
    try:
        return _run(settings)
    except EngineError as error:
        if isinstance(error, ValueError):
            raise
        print(f"rayloom-engine bench peers: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_settings(args: argparse.Namespace, arguments: Sequence[str]) -> PeersSettings:
    """The checked settings. Raises ConfigError with the flag, the given value and the allowed values."""
    sweeps = () if args.no_sweep else (*DECODE_SWEEP, *PREFILL_SWEEP)
    return PeersSettings(
        engines=parse_engines(args.engines),
        workloads=parse_workloads(args.workloads, args.scale, COMPARED),
        sweeps=sweeps,
        num_rounds=args.rounds,
        scale=args.scale,
        seed=args.seed,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        compares_answers=not args.no_answers,
        neighbour_s=args.neighbour_seconds,
        is_install_only=args.install_only,
        page_folder=args.page,
        has_plots=not args.no_plots,
        json_file=args.json,
        command=shown(["rayloom-engine", *arguments]),
    )


def _run(settings: PeersSettings) -> int:
    from rayloom_bench.machine import BUSY_WARNING_PERCENT, busy_percent
    from rayloom_bench.peers.engines.contestants import contestants
    from rayloom_bench.peers.report import plots
    from rayloom_bench.peers.report.document import document
    from rayloom_bench.peers.report.page import page
    from rayloom_bench.peers.rounds import measure

    draws = settings.page_folder is not None and settings.has_plots
    if draws:
        plots.require_matplotlib()
    engines = contestants(settings.engines, settings.cores, log=_log)
    if settings.is_install_only:
        return 0
    busy = busy_percent()
    if busy > BUSY_WARNING_PERCENT:
        _log(
            f"warning: other processes keep {busy:.0f} % of this machine busy; neither figures nor ratios will be right"
        )
    result = _empty_result(settings, engines)
    measure(settings, engines, result, log=_log)
    text = page(result, has_plots=draws)
    print(text)
    if settings.page_folder is not None:
        settings.page_folder.mkdir(exist_ok=True)
        (settings.page_folder / PAGE).write_text(text, encoding="utf-8")
        if draws:
            plots.draw(result, settings.page_folder)
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


def _empty_result(settings: PeersSettings, engines: Sequence[Contestant]) -> PeersResult:
    from rayloom_bench.machine import package_versions, processor_name
    from rayloom_bench.peers.result import EngineFacts, PeersResult

    return PeersResult(
        about={
            "processor": processor_name(),
            "num_cores": len(settings.cores),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
            "num_rounds": settings.num_rounds,
            "seed": settings.seed,
            "scale": settings.scale,
            "command": settings.command,
        },
        engines={each.name: EngineFacts(title=each.title, shown_command=each.shown_command) for each in engines},
        workloads=settings.workloads,
        sweeps=settings.sweeps,
    )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
