"""`rayloom-engine bench simulation`: the fleet simulation's speeds beside those of a real engine on this machine.

Measures steps (`rayloom-engine bench step`) and fits the costs of a step to them. Then measures the workloads W1 to W4
with a real engine, and simulates them with these costs. A round takes about a minute, the steps take three. The goal
is a difference of at most 10 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rayloom_bench.machine import busy_percent
from rayloom_bench.settings import page_file, positive

PAGE = "simulation.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="checkpoint; default: the engine's")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the workloads, whose median counts (default 3)")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, simulates and prints. Returns 1 if a measurement failed, else 0; a missed goal is in the text.

    Raises ConfigError.
    """
    from rayloom_bench.fleet.measured import compare, page, speeds
    from rayloom_bench.fleet.step_cost import read_cost
    from rayloom_bench.peers.engines.shown_command import shown
    from rayloom_bench.report import machine_line

    num_rounds = positive("--rounds", args.rounds)
    assert num_rounds is not None
    target = page_file(args.page, PAGE)
    conditions = machine_line(busy_percent())
    model = ["--model", args.model] if args.model else []
    with tempfile.TemporaryDirectory(prefix="rayloom-bench-") as name:
        folder = Path(name)
        steps = folder / "step.json"
        if not _bench("step", "--plot", str(folder / "step.svg"), "--json", str(steps), *model):
            return 1
        cost = read_cost(steps)
        documents = []
        for number in range(num_rounds):
            result = folder / f"round-{number}.json"
            if not _bench("--dtype", "bfloat16", "--no-limit", "--json", str(result), *model):
                return 1
            documents.append(json.loads(result.read_text(encoding="utf-8")))
    others = [percent for document in documents for percent in document["others_percent"].values()]
    text = page(conditions, cost, compare(cost, [speeds(each) for each in documents]), others)
    print(text)
    if target is not None:
        command = f"Written by `{shown(['rayloom-engine', *sys.argv[1:]])}`."
        target.write_text(f"# Simulated and measured speed\n\n{command}\n\n{text}\n", encoding="utf-8")
    return 0


def _bench(*arguments: str) -> bool:
    """Runs a bench with its output on stderr. Returns whether it succeeded."""
    command = [sys.executable, "-m", "rayloom_engine", "bench", *arguments]
    print(f"bench simulation: bench {' '.join(arguments)}", file=sys.stderr, flush=True)
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0
