"""The command line of `rayloom-engine bench`. Heavy modules are imported only when a run starts."""

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
Measure an OpenAI server with the workloads W1 to W4: streamed requests without retries, each output checked for its
exact length. Without --url the bench starts an engine, measures and stops it. The exit code is 1 if anything failed.

  W1  32 requests, 16 at a time, 128 in / 64 out            W3  8 requests, one at a time, 128 in / 128 out
  W2  32 requests, 16 at a time, 512 shared + 32 in / 32    W4  8 requests, 4 at a time, 2048 in / 32 out

`bench channel` measures round trips of a step to a rank, compared with calls of a Ray actor. `bench parallel`
measures a model over several ranks of this machine, compared with one rank. `bench peers` measures vLLM and llama.cpp
as well. `bench quality` measures speed and perplexity of int8 weights, compared with the checkpoint's own.
`bench quantised` measures quantised GGUF files, compared with llama.cpp. `bench routing` measures the gateway's choice
of an engine, compared with others. `bench simulation` compares the simulation of `rayloom-bench fleet` with a real
engine. `bench speculation` measures n-gram speculation, compared with none. `bench step` prints where a step on the C
library spends its time, beside the machine's limit. `bench gpu` measures one rank on a GPU, beside the card's limits.
`bench pages` runs parallel, peers, quality, quantised and step, and writes their pages.
"""
# name -> module
SUBCOMMANDS = {
    "channel": "control_channel",
    "gateway": "gateway.command",
    "gpu": "gpu.command",
    "pages": "pages",
    "parallel": "parallel.command",
    "peers": "peers.command",
    "quality": "quality.command",
    "quantised": "quantised.command",
    "routing": "routing.command",
    "simulation": "fleet.measured_command",
    "speculation": "speculation.command",
    "step": "step.command",
}


def add_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Adds flags and the function `run` to the engine's parser of the `bench` command.

    `arguments`: the arguments after the command's name. If they begin with a subcommand, adds the subcommand's
    flags instead.
    """
    if arguments and arguments[0] in SUBCOMMANDS:
        module = importlib.import_module(f"rayloom_bench.{SUBCOMMANDS[arguments[0]]}")
        subcommands = parser.add_subparsers(required=True)
        module.add_flags(subcommands.add_parser(arguments[0], description=module.__doc__))
        return
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)
    target = parser.add_argument_group("measured server")
    target.add_argument("--url", help="any OpenAI server, such as http://127.0.0.1:8000; default: start an engine")
    target.add_argument("--name", help="name of the server at --url in the table; default: its host and port")
    target.add_argument("--model", help="checkpoint to serve and to compare with; with --url only to compare with")
    target.add_argument("--revision", help="hub revision of --model")
    target.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="type of the weights"
    )
    target.add_argument("--threads", type=int, help="threads of the engine and of its peers; default: all usable cores")
    target.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="flags for rayloom-engine serve, after --")

    load = parser.add_argument_group("load and output")
    load.add_argument("--workloads", default="W1,W2,W3,W4", help="workloads, separated by commas; default: all four")
    load.add_argument("--scale", type=float, default=1.0, help="fraction of the requests, rounded up to a whole batch")
    load.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    load.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")

    others = parser.add_argument_group("compared in the same run")
    others.add_argument("--compare", choices=("transformers",), help="measure generate of transformers as well")
    others.add_argument(
        "--compare-dtype",
        default="bfloat16",
        help="type for --compare, or several separated by commas: bfloat16,float32 (default bfloat16)",
    )
    others.add_argument("--no-limit", action="store_true", help="do not measure the machine's limit")

    foreign = parser.add_argument_group("other servers (--url)")
    foreign.add_argument("--served-model-name", help="the model's name in the API; default: the first in /v1/models")
    foreign.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="variable with the API key (default OPENAI_API_KEY)"
    )
    foreign.add_argument("--text-prompts", action="store_true", help="send text instead of token ids")
    foreign.add_argument("--omit-ignore-eos", action="store_true", help="send neither ignore_eos nor min_tokens")
    foreign.add_argument(
        "--vocab-size", type=int, help="upper bound of token ids; default: that of --model, else 32000"
    )
    foreign.add_argument("--weight-bytes", type=int, help="bytes of all weights, to compute the machine's limit")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a request, a peer or a server failed, else 0.

    Raises ConfigError or ModelError.
    """
    settings = parse_settings(args)
    api_key = os.environ.get(args.api_key_env) if settings.url is not None else None
    previous = signal.signal(signal.SIGTERM, exit_in_order)
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
    """The checked settings. Raises ConfigError with the flag, the given value and the allowed values."""
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

    result = measure(settings, api_key, log=lambda line: print(line, file=sys.stderr, flush=True))
    print(summary(result), table(result), sep="\n\n")
    for failure in result.failures:
        print(f"FAILED {failure.name}: {failure.reason}")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


def exit_in_order(signum: int, frame: FrameType | None) -> None:
    """Raises SystemExit, so that context managers stop the servers and peers that were started."""
    raise SystemExit(128 + signum)
