"""`rayloom-engine bench quality`: speed, memory and perplexity of a model with plain weights and with int8 weights.

First the engine is called directly, with all forms of the weights in the memory of this process at once. Then W3 is
measured over HTTP, with a server of each form in turn. Rounds of the forms alternate, so that a busy moment of the
machine slows all of them. The page has the goals of int8 weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rayloom_bench.machine import busy_percent, processor_name
from rayloom_bench.quality.forms import FORMS, fixed_text, measure, table
from rayloom_bench.quality.page import page
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_bench.settings import page_file, positive
from rayloom_bench.variants.rounds import Variant, VariantResult, measure_variants
from rayloom_bench.workload import Workload, parse_workloads
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape
from rayloom_engine.worker.machine import usable_cores

PAGE = "int8.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--model", default=EngineConfig().model, help="the checkpoint")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="type of the weights")
    parser.add_argument("--threads", type=int, help="compute threads; default: all usable cores")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to score; default: a text of this package")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of speed; 0 measures none (default 3)")
    parser.add_argument("--http-rounds", type=int, default=3, help="rounds of W3 over HTTP; 0: none (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of W3's requests over HTTP")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a request over HTTP failed, else 0. Raises ConfigError or ModelError."""
    text = fixed_text() if args.text is None else _read(args.text)
    busy = busy_percent()
    threads = positive("--threads", args.threads)
    target = page_file(args.page, PAGE)
    (workload,) = parse_workloads("W3", args.scale)
    found = measure(args.model, args.dtype, threads, text, num_rounds=args.rounds)
    over_http = _measure_over_http(args, workload, threads)
    disturbed = max(busy, over_http.most_disturbed_percent)
    warning = " **DISTURBED: do not quote the speeds.**" if disturbed > DISTURBED_PERCENT else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    conditions = (
        f"{processor_name()}, {threads or usable_cores()} threads, {today}. {args.model}, plain weights: {args.dtype}. "
        f"W3: {workload.description}; {args.http_rounds} rounds over HTTP, {args.rounds} without. "
        f"Other processes used up to {disturbed:.0f} % of the CPU time.{warning}"
    )
    written = page(found, over_http, conditions, table(found))
    print(written)
    if target is not None:
        target.write_text(written, encoding="utf-8")
    if args.json is not None:
        document = {form: asdict(figures) for form, figures in found.items()}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if over_http.failures else 0


def _measure_over_http(args: argparse.Namespace, workload: Workload, threads: int | None) -> VariantResult:
    flags = ("--model", args.model, "--dtype", args.dtype, *(("--threads", str(threads)) if threads else ()))
    return measure_variants(
        [Variant(name=form, flags=(*flags, "--quantization", form)) for form in FORMS],
        workload,
        num_rounds=args.http_rounds,
        seed=0,
        vocab_size=read_shape(resolve(args.model, None).path).vocab_size,
        log=lambda line: print(f"over HTTP, {line}", file=sys.stderr, flush=True),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path} cannot be read as text: {error}") from error
