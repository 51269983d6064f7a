"""The command line of `rayloom-engine bench`. Light to import: everything heavy is imported when a run starts."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rayloom_engine.errors import EngineError

if TYPE_CHECKING:
    from rayloom_bench.settings import BenchSettings

DESCRIPTION = """\
Measure an OpenAI server with the workloads W1 to W4: streamed requests, retries off, every output checked for its
exact length. Without --url an engine of our own is started, measured and stopped. Exit code 1 when anything failed.

  W1  32 requests, 16 at a time, 128 in / 64 out            W3  8 requests, one at a time, 128 in / 128 out
  W2  32 requests, 16 at a time, 512 shared + 32 in / 32    W4  8 requests, 4 at a time, 2048 in / 32 out

Two others measure something else: `bench channel` a step's way to a rank and back, beside a call of a Ray actor;
`bench parallel` what it costs to spread a model over ranks of this machine.
"""
SUBCOMMANDS = {"channel": "control_channel", "parallel": "parallel"}  # name -> module


def add_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Give the parser of the `bench` command, which the engine made and named, its flags and what it runs.

    `arguments` follow the command's name; what else can be measured has flags of its own.
    """
    if arguments and arguments[0] in SUBCOMMANDS:
        module = importlib.import_module(f"rayloom_bench.{SUBCOMMANDS[arguments[0]]}")
        subcommands = parser.add_subparsers(required=True)
        module.add_flags(subcommands.add_parser(arguments[0], description=module.__doc__))
        return
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--url", help="any OpenAI server, such as http://127.0.0.1:8000; default: start our own engine")
    what.add_argument("--name", help="name of the server at --url in the table; default: its host and port")
    what.add_argument("--model", help="checkpoint to serve and to compare with; with --url only to compare with")
    what.add_argument("--revision", help="hub revision of --model")
    what.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="of weights")
    what.add_argument("--threads", type=int, help="for our engine and its peers; default: the cores we may use")
    what.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="flags for rayloom-engine serve, after --")

    how = parser.add_argument_group("how")
    how.add_argument("--workloads", default="W1,W2,W3,W4", help="which, with commas; default: all four")
    how.add_argument("--scale", type=float, default=1.0, help="share of the requests, rounded up to a whole batch")
    how.add_argument("--seed", type=int, default=0, help="of the random prompts (default 0)")
    how.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found to this file")

    beside = parser.add_argument_group("beside it, in the same run")
    beside.add_argument("--compare", choices=("transformers",), help="measure transformers' own generate as well")
    beside.add_argument(
        "--compare-dtype",
        default="bfloat16",
        help="type for --compare, or several with commas: bfloat16,float32 (default bfloat16)",
    )
    beside.add_argument("--no-limit", action="store_true", help="leave the machine's own limit out")

    foreign = parser.add_argument_group("other servers (--url)")
    foreign.add_argument("--served-model-name", help="the model's name in the API; default: the first that it lists")
    foreign.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="variable with the API key (default OPENAI_API_KEY)"
    )
    foreign.add_argument("--text-prompts", action="store_true", help="send text instead of token ids")
    foreign.add_argument("--omit-ignore-eos", action="store_true", help="leave ignore_eos and min_tokens out")
    foreign.add_argument("--vocab-size", type=int, help="bound for token ids; default: --model's, else 32000")
    foreign.add_argument("--weight-bytes", type=int, help="bytes of all weights, for the machine's limit")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0, or 1 when something failed. Raises ConfigError or ModelError."""
    settings = parse_settings(args)
    api_key = os.environ.get(args.api_key_env) if settings.url is not None else None
    previous = signal.signal(signal.SIGTERM, _exit_in_order)
    try:
        return _measure(settings, api_key)
    except EngineError as error:
        if isinstance(error, ValueError):
            raise
        print(f"rayloom-engine bench: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_settings(args: argparse.Namespace) -> BenchSettings:
    """The checked settings. Raises ConfigError that names the flag, what was given and what is allowed."""
    from rayloom_bench.endpoint import base_url
    from rayloom_bench.settings import BenchSettings, parse_compare_dtypes, positive, without_separator
    from rayloom_bench.workload import parse_workloads
    from rayloom_engine.config import EngineConfig
    from rayloom_engine.worker.machine import usable_cores

    return BenchSettings(
        url=None if args.url is None else base_url(args.url),
        name=args.name,
        model=args.model if args.url or args.model else EngineConfig().model,
        revision=args.revision,
        served_model_name=args.served_model_name,
        dtype=args.dtype,
        serve_flags=without_separator(args.serve_flags),
        workloads=parse_workloads(args.workloads, args.scale),
        scale=args.scale,
        seed=args.seed,
        threads=positive("--threads", args.threads) or usable_cores(),
        compares=args.compare is not None,
        compare_dtypes=parse_compare_dtypes(args.compare_dtype),
        uses_text=args.text_prompts,
        ignores_eos=not args.omit_ignore_eos,
        vocab_size=positive("--vocab-size", args.vocab_size),
        weight_bytes=positive("--weight-bytes", args.weight_bytes),
        measures_limit=not args.no_limit,
        json_file=args.json,
    )


def _measure(settings: BenchSettings, api_key: str | None) -> int:
    from rayloom_bench.report import document, summary, table
    from rayloom_bench.sequence import measure

    result = measure(settings, api_key, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(summary(result), table(result), sep="\n\n")
    for failure in result.failures:
        print(f"FAILED {failure.name}: {failure.reason}")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


def _exit_in_order(signum: int, frame: FrameType | None) -> None:
    """Unwinds the stack, so that the server and the peers that were started are ended too."""
    raise SystemExit(128 + signum)
