"""`rayloom-engine bench parallel`: the cost of a model over several ranks of one machine, compared with one rank.

Each round measures the same workload on every layout in turn, so that all figures of a ratio come from one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayloom_bench.client import Failure, run_workload
from rayloom_bench.figures import summarise
from rayloom_bench.machine import busy_percent, processor_name
from rayloom_bench.server import Server, ServerFailed, running_server
from rayloom_bench.workload import Workload, parse_workloads, token_prompts
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape

MODEL = "builtin://smollm2-135m"
NARROW_HEADS = {"num_attention_heads": 18, "num_key_value_heads": 6, "head_dim": 32}
START_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A division of one model into ranks."""

    name: str
    has_narrow_heads: bool = False
    tensor: int = 1
    pipeline: int = 1
    max_ratio: float | None = None  # goal: wall time as a multiple of one rank's; None: this layout is the one rank

    @property
    def flags(self) -> list[str]:
        sizes = ["--tensor-parallel-size", str(self.tensor), "--pipeline-parallel-size", str(self.pipeline)]
        return [*sizes, "--executor", "uni" if self.tensor * self.pipeline == 1 else "mp"]


LAYOUTS = (
    Layout(name="1 rank"),
    Layout(name="pipeline 2", pipeline=2, max_ratio=1.4),
    Layout(name="tensor 3", tensor=3, max_ratio=2.2),
    Layout(name="1 rank, narrow heads", has_narrow_heads=True),
    Layout(name="tensor 2, narrow heads", has_narrow_heads=True, tensor=2, max_ratio=1.4),
)


@dataclass(slots=True)
class Rounds:
    """The figures of one layout, each with a value per round."""

    wall_s: list[float] = field(default_factory=list)
    tok_s: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)  # the ranks' mean fraction of wall time


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each layout (default 3)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of W1's requests, rounded up to a whole batch"
    )
    parser.add_argument("--dtype", default="auto", help="type of the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a request failed or a server did not start, else 0. Raises ConfigError."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds: {args.rounds} given; use 1 or more")
    (workload,) = parse_workloads("W1", args.scale)
    print(f"{processor_name()}, {busy_percent():.0f} % busy before the run; {workload.name}: {workload.description}")
    try:
        rounds, failures = measure(workload, args.rounds, args.dtype, args.seed)
    except ServerFailed as error:
        print(f"rayloom-engine bench parallel: {error}", file=sys.stderr)
        return 1
    print(table(rounds))
    for failure in failures:
        print(f"FAILED {failure.name}: {failure.reason}")
    return 1 if failures else 0


def measure(workload: Workload, num_rounds: int, dtype: str, seed: int) -> tuple[dict[str, Rounds], list[Failure]]:
    """Measures every layout once a round. Returns layout -> figures, and the failures. Raises ServerFailed."""
    rounds = {layout.name: Rounds() for layout in LAYOUTS}
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(prefix="rayloom-bench-") as folder:
        models = {False: MODEL, True: str(narrow_heads(resolve(MODEL, None).path, Path(folder)))}
        for number in range(1, num_rounds + 1):
            for layout in LAYOUTS:
                print(f"round {number} of {num_rounds}: {layout.name}", file=sys.stderr, flush=True)
                flags = ["--model", models[layout.has_narrow_heads], "--dtype", dtype, *layout.flags]
                with running_server(flags) as server:
                    failures += _measure(server, workload, seed, rounds[layout.name])
    return rounds, failures


def narrow_heads(source: Path, folder: Path) -> Path:
    """Writes a checkpoint with the matrices of `source` and more, narrower heads, which two ranks can share evenly.

    It computes meaningless text at the same cost. Returns `folder`.
    """
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **NARROW_HEADS}), encoding="utf-8")
    return folder


def table(rounds_by_layout: dict[str, Rounds]) -> str:
    """Medians over the rounds, and each layout's wall time as a multiple of one rank's with the same model."""
    base_s = float("nan")
    lines = [f"{'':<26}{'out tok/s':>10}{'wall s':>9}{'x 1 rank':>10}{'goal':>8}{'communication':>15}"]
    for layout in LAYOUTS:
        rounds = rounds_by_layout[layout.name]
        if not rounds.wall_s:
            continue
        wall_s = statistics.median(rounds.wall_s)
        share = statistics.median(rounds.communication)
        line = f"{layout.name:<26}{statistics.median(rounds.tok_s):>10.1f}{wall_s:>9.2f}"
        if layout.max_ratio is None:
            base_s = wall_s
        else:
            ratio = wall_s / base_s
            line += f"{ratio:>9.2f}x{'<= ' + format(layout.max_ratio, '.1f') + 'x':>8}{share:>14.0%}"
            line += "" if ratio <= layout.max_ratio else "  MISSED"
        lines.append(line)
    lines.append(
        "communication: mean fraction of wall time that a rank spends in sums, in gathers and waiting for other ranks."
    )
    return "\n".join(lines)


def _measure(server: Server, workload: Workload, seed: int, rounds: Rounds) -> Sequence[Failure]:
    server.wait_ready(START_S)
    endpoint = server.endpoint()
    shape = read_shape(resolve(MODEL, None).path)
    warm_up = workload.warm_up()
    prompts = token_prompts(warm_up, seed=seed, vocab_size=shape.vocab_size, purpose="warm-up")
    outcome = run_workload(endpoint, warm_up, prompts, label="warm-up")
    if outcome.failures:
        return outcome.failures
    before_s = _communication_s(server)
    outcome = run_workload(endpoint, workload, token_prompts(workload, seed=seed, vocab_size=shape.vocab_size))
    if outcome.failures:
        return outcome.failures
    figures = summarise(outcome.records)
    rounds.wall_s.append(figures.wall_s)
    rounds.tok_s.append(figures.output_tok_s)
    rounds.communication.append((_communication_s(server) - before_s) / figures.wall_s)
    return ()


def _communication_s(server: Server) -> float:
    """Mean over the ranks of their seconds of communication since they started."""
    return statistics.mean(rank.communication_seconds for rank in server.status().ranks)
