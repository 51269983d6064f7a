"""`rayloom-engine bench parallel`: a model over several ranks of this machine, compared with one rank.

All ranks share the machine's cores, so several ranks are slower than one. The bench measures the difference. In each
round, W1 runs with every layout in turn. So a busy moment of the machine slows all layouts. With --narrow-heads the
bench also measures two tensor-parallel ranks. Two ranks cannot share the 3 key/value heads of the built-in model
evenly. So these ranks load a checkpoint with the same matrices, cut into more and smaller heads. The text that this
checkpoint generates has no meaning.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

from rayloom_bench.machine import busy_percent, processor_name
from rayloom_bench.parallel.layouts import LAYOUTS, MODEL, NARROW_LAYOUTS, narrow_heads
from rayloom_bench.parallel.page import page
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_bench.settings import page_file, parse_compare_dtypes
from rayloom_bench.variants.rounds import measure_variants
from rayloom_bench.workload import parse_workloads
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape
from rayloom_engine.worker.machine import usable_cores

PAGE = "parallel.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each layout (default 3)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of W1's requests, rounded up to a whole batch"
    )
    parser.add_argument(
        "--dtypes",
        default="bfloat16,float32",
        help="types of the weights, separated by commas (default bfloat16,float32)",
    )
    parser.add_argument("--narrow-heads", action="store_true", help="also measure two tensor-parallel ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a request failed or a server did not start, else 0. Raises ConfigError."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds: {args.rounds} given; use 1 or more")
    dtypes = parse_compare_dtypes(args.dtypes, "--dtypes")
    target = page_file(args.page, PAGE)
    (workload,) = parse_workloads("W1", args.scale)
    layouts = (*LAYOUTS, *NARROW_LAYOUTS) if args.narrow_heads else LAYOUTS
    busy = busy_percent()
    source = resolve(MODEL, None).path
    with tempfile.TemporaryDirectory(prefix="rayloom-bench-") as folder:
        models = {False: MODEL, True: str(narrow_heads(source, Path(folder)))}
        result = measure_variants(
            [layout.variant(models[layout.has_narrow_heads], dtype) for dtype in dtypes for layout in layouts],
            workload,
            num_rounds=args.rounds,
            seed=args.seed,
            vocab_size=read_shape(source).vocab_size,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
    disturbed = max(busy, result.most_disturbed_percent)
    conditions = (
        f"{processor_name()}, {usable_cores()} cores, {datetime.datetime.now(datetime.UTC).date().isoformat()}. "
        f"W1: {workload.description}. Rounds: {args.rounds}, seed {args.seed}. Other processes used up to "
        f"{disturbed:.0f} % of the CPU time."
        + (" **DISTURBED: do not quote these figures.**" if disturbed > DISTURBED_PERCENT else "")
    )
    text = page(result, layouts, dtypes, conditions)
    print(text)
    if target is not None:
        target.write_text(text, encoding="utf-8")
    return 1 if result.failures else 0
