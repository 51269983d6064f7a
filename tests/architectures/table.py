"""`make archs`: tiny models of many architectures against transformers, and the table docs/benchmarks/architectures.md.

Each model runs in a process of its own, so that a crash costs one line of the table. Two ranks that share layers run in
further processes. The exit code is 1 if fewer than `LEAST` architectures pass every check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import transformers  # noqa: F401 - imported before the forks

from rayloom_engine.errors import ModelError
from rayloom_engine.models.reading import read_model_shape
from rt_architecture_checks import CHECKS, PROMPTS, compare
from rt_architectures import ARCHITECTURES, NUM_TOKENS, REFUSED
from rt_two_ranks import TwoRanks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "architectures.md"
LEAST = 32
_SECONDS = 600.0  # limit for one model
# A fork has the imports of this process already. These imports take longer than the checks of a model.
_CONTEXT = multiprocessing.get_context("fork")

_SHARDS = "two shards"
_COLUMNS = (*CHECKS, _SHARDS)
_MARKS = {True: "yes", False: "**no**", None: "refused"}


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    architecture: str = ""
    backend: str = ""
    expected: list[list[int]] = field(default_factory=list)
    passed: dict[str, bool | None] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_green(self) -> bool:
        return bool(self.passed) and all(self.passed.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; without any, all of them run and the page is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models at the same time (default: cores)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = _rows(args.names or list(ARCHITECTURES), args.jobs)
    num_green = sum(row.is_green for row in rows)
    print(f"{num_green} of {len(rows)} architectures pass every check")
    if args.names:
        return int(num_green < len(rows))
    PAGE.write_text(page(rows, [(name, _refusal(name)) for name in REFUSED]), encoding="utf-8")
    return int(num_green < LEAST)


def _rows(names: list[str], num_jobs: int) -> list[Row]:
    """Returns the rows of all models, in their order."""
    waiting, done = _CONTEXT.Queue(), _CONTEXT.Queue()
    for name in [*names, *[None] * num_jobs]:
        waiting.put(name)
    workers = [_CONTEXT.Process(target=_work, args=(waiting, done)) for _ in range(num_jobs)]
    for worker in workers:
        worker.start()
    rows: dict[str, Row] = {}
    for _ in names:
        row = done.get()
        rows[row.name] = row
        print(f"{row.name:20} {'green' if row.is_green else row.failure or row.passed}", flush=True)
    for worker in workers:
        worker.join()
    return [rows[name] for name in names]


def _work(waiting: Queue[str | None], done: Queue[Row]) -> None:
    ranks = TwoRanks()
    for name in iter(waiting.get, None):
        done.put(_checked(name, ranks))
    ranks.close()


def _checked(name: str, ranks: TwoRanks) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        row = _in_process(name, Path(scratch))
        if row.failure:
            return row
        try:
            tokens = ranks.greedy(Path(scratch), PROMPTS, NUM_TOKENS, tensor=2)
        except Exception as error:  # noqa: BLE001 - any failure is a result
            return replace(row, passed={**row.passed, _SHARDS: False}, failure=f"{_SHARDS}: {error}")
    return replace(row, passed={**row.passed, _SHARDS: tokens == row.expected if tokens else None})


def _in_process(name: str, folder: Path) -> Row:
    """Forks this process. The fork writes the model `name` into a folder and computes its row; returns this row."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_send_row, args=(name, folder, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_SECONDS):
            return Row(name, failure=f"no result within {_SECONDS:g} s")
        row: Row = receiver.recv()
        return row
    except EOFError:
        process.join(10.0)
        return Row(name, failure=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join(10.0)


def _send_row(name: str, folder: Path, sender: Connection) -> None:
    try:
        sender.send(_row(name, folder))
    except Exception as error:  # noqa: BLE001 - any failure is a result
        sender.send(Row(name, failure=f"{type(error).__name__}: {error}".partition("\n")[0]))


def _row(name: str, folder: Path) -> Row:
    compared = compare(folder, ARCHITECTURES[name])
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return Row(name, architecture, compared.backend, compared.expected, compared.passed)


def _refusal(name: str) -> str:
    """The message with which the engine refuses a model, without the name of the file."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.json"
        path.write_text(json.dumps({"model_type": name, **REFUSED[name]}), encoding="utf-8")
        try:
            read_model_shape(Path(scratch))
        except ModelError as error:
            return str(error).removeprefix(f"{path}: ").partition("; works")[0]
    return "not refused"


def page(rows: list[Row], refusals: list[tuple[str, str]]) -> str:
    """The Markdown page with the table."""
    num_green = sum(row.is_green for row in rows)
    num_shared = sum(bool(row.passed.get(_SHARDS)) for row in rows)
    lines = [
        "# Architectures",
        "",
        f"`make archs` wrote this page with transformers {version('transformers')}: {num_green} of {len(rows)} "
        f"architectures pass every check, and {num_shared} pass with two shards.",
        "",
        "For each architecture transformers makes a tiny model with random weights and generates "
        f"{NUM_TOKENS} greedy tokens after each of four prompts, in float32. The engine must generate the same tokens, "
        "with prompts computed *at once* or *chunked* into steps of 7 tokens, all prompts *batched*, *preempted* for "
        "lack of KV blocks, *replayed* by a new engine from the first five tokens, by *two stages* of a pipeline with "
        "a small pool, and by *two shards*, processes that share every layer (tensor parallelism). *Refused* means "
        "that the engine refuses this layout, with a sentence, before it reads a weight. The "
        "[backend](../models.md#model-backends) is the one that `auto` took when this page was written.",
        "",
        f"| model type | architecture | backend | {' | '.join(_COLUMNS)} |",
        f"|{'---|' * (3 + len(_COLUMNS))}",
    ]
    for row in rows:
        marks = [_MARKS[row.passed.get(check, False)] for check in _COLUMNS]
        lines.append(f"| {row.name} | {row.architecture or row.failure} | {row.backend} | {' | '.join(marks)} |")
    lines += [
        "",
        "## Refused",
        "",
        "These are refused before any weight is read:",
        "",
        "| model type | reason |",
        "|---|---|",
    ]
    lines += [f"| {name} | {reason} |" for name, reason in refusals]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
