"""`rayloom-engine bench quantised`: this engine and llama.cpp with the same quantised GGUF files, in turn.

If llama.cpp and the files are not in the cache, first installs and makes them there (about fifteen minutes). Then
compares greedy answers. Then measures W3 (one stream) and W1 (16 streams) with every file in each round. Prints the
page, and with --page writes it as quantised.md into a folder. The exit code is 1 if a server or a request failed;
missed goals do not change it. On a busy machine use --threads 1 and compare CPU times: several threads of llama.cpp
would use CPU time while they wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_bench.command import exit_in_order
from rayloom_bench.machine import busy_percent, package_versions, processor_name
from rayloom_bench.settings import page_file, positive
from rayloom_bench.workload import parse_workloads
from rayloom_engine.errors import ConfigError, EngineError
from rayloom_engine.worker.machine import usable_cores

if TYPE_CHECKING:
    from rayloom_bench.quantised.files import QuantisedFile
    from rayloom_bench.quantised.result import QuantisedResult
    from rayloom_bench.quantised.rounds import RoundsPlan
    from rayloom_bench.workload import Workload

PAGE = "quantised.md"
DEFAULT_ROUNDS = 3
MODELS = ("builtin", "wide")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help=f"models; default: {','.join(MODELS)}")
    parser.add_argument("--workloads", default="W3,W1", help="workloads, separated by commas; default: W3,W1")
    parser.add_argument(
        "--rounds", type=int, default=DEFAULT_ROUNDS, help=f"starts of each server (default {DEFAULT_ROUNDS})"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the requests, rounded up to a whole batch"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.add_argument("--threads", type=int, help="compute threads of each server; default: all usable cores")
    parser.add_argument("--no-answers", action="store_true", help="do not compare greedy answers")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a server or a request failed, else 0. Raises ConfigError."""
    workloads = parse_workloads(args.workloads, args.scale)
    models = parse_models(args.models)
    num_threads = positive("--threads", args.threads) or usable_cores()
    positive("--rounds", args.rounds)
    target = page_file(args.page, PAGE)
    previous = signal.signal(signal.SIGTERM, exit_in_order)
    try:
        return _run(args, workloads, models, num_threads, target)
    except EngineError as error:
        if isinstance(error, ValueError):
            raise
        print(f"rayloom-engine bench quantised: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse_models(names: str) -> tuple[str, ...]:
    """The models of a list such as `builtin,wide`. Raises ConfigError for an unknown name."""
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    if not chosen or not chosen <= set(MODELS):
        raise ConfigError(f"--models: {names!r} given; name one or more of {', '.join(MODELS)}, with commas between")
    return tuple(name for name in MODELS if name in chosen)


def _run(
    args: argparse.Namespace,
    workloads: tuple[Workload, ...],
    models: tuple[str, ...],
    num_threads: int,
    target: Path | None,
) -> int:
    from rayloom_bench.peers.engines import llama_cpp
    from rayloom_bench.peers.engines.installation import peers_folder
    from rayloom_bench.quantised.files import quantised_files
    from rayloom_bench.quantised.page import page
    from rayloom_bench.quantised.rounds import measure, servers

    parent = peers_folder(os.environ)
    cores = usable_cores()
    llama = llama_cpp.install(parent, processor=processor_name(), num_jobs=cores, log=_log)
    files = [
        file
        for file in quantised_files(parent, llama, num_jobs=cores, log=_log)
        if file.choice.file_name.startswith(models)
    ]
    result = _empty_result(args, workloads, num_threads)
    measure([(file, servers(file, llama, num_threads)) for file in files], _plan(args, num_threads), result, log=_log)
    text = page(result)
    print(text)
    if target is not None:
        target.write_text(text, encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(_document(result, files), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failures else 0


def _plan(args: argparse.Namespace, num_threads: int) -> RoundsPlan:
    """The sizes of the run. All files get the same prompts, because all have the tokenizer of the built-in model."""
    from rayloom_bench.peers.answers.agreement import end_ids
    from rayloom_bench.peers.answers.greedy_prompts import prompts
    from rayloom_bench.peers.engines.contestants import MODEL
    from rayloom_bench.quantised.rounds import RoundsPlan
    from rayloom_engine.models.checkpoint.source import resolve
    from rayloom_engine.models.shape import read_shape

    folder = resolve(MODEL).path
    return RoundsPlan(
        num_rounds=args.rounds,
        seed=args.seed,
        num_threads=num_threads,
        vocab_size=read_shape(folder).vocab_size,
        prompts=() if args.no_answers else prompts(folder),
        ends=end_ids(folder),
    )


def _empty_result(args: argparse.Namespace, workloads: tuple[Workload, ...], num_threads: int) -> QuantisedResult:
    from rayloom_bench.peers.engines import llama_cpp
    from rayloom_bench.quantised.result import QuantisedResult

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    described = ". ".join(f"{workload.name}: {workload.description}" for workload in workloads)
    return QuantisedResult(
        conditions=(
            f"{processor_name()}, {num_threads} threads, {today}. {versions}; llama.cpp of llama-cpp-python "
            f"{llama_cpp.VERSION}. {described}. {args.rounds} rounds."
        ),
        workloads=workloads,
        most_disturbed_percent=busy_percent(),
    )


def _document(result: QuantisedResult, files: list[QuantisedFile]) -> dict[str, object]:
    document = dataclasses.asdict(result)
    for entry, file in zip(document["files"], files, strict=True):
        entry["file"]["path"] = file.path.name
    return document


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
