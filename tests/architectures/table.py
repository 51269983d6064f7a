"""`make archs`: tiny models of many architectures against transformers, and the table docs/benchmarks/architectures.md.

Each model runs in a process of its own, so that a crash costs one line of the table. The exit code is 1 if fewer than
`LEAST` architectures pass every check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers  # noqa: F401 - imported before the forks

from rayloom_engine.errors import ModelError
from rayloom_engine.models.reading import read_model_shape
from rt_architecture_checks import CHECKS, compare
from rt_architectures import ARCHITECTURES, NUM_TOKENS, REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "architectures.md"
LEAST = 32
_SECONDS = 600.0  # for one model
# A fork has the imports of this process, which take longer than a model.
_CONTEXT = multiprocessing.get_context("fork")

_MARKS = {True: "yes", False: "**no**", None: "refused"}


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    architecture: str = ""
    backend: str = ""
    passed: dict[str, bool | None] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_green(self) -> bool:
        return bool(self.passed) and all(self.passed.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; without any, all of them run and the page is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.names or ARCHITECTURES:
        rows.append(_in_process(name))
        print(f"{name:20} {'green' if rows[-1].is_green else rows[-1].failure or rows[-1].passed}", flush=True)
    num_green = sum(row.is_green for row in rows)
    print(f"{num_green} of {len(rows)} architectures pass every check")
    if args.names:
        return int(num_green < len(rows))
    PAGE.write_text(page(rows, [(name, _refusal(name)) for name in REFUSED]), encoding="utf-8")
    return int(num_green < LEAST)


def _in_process(name: str) -> Row:
    """Returns the row of a model, from a process that has the imports of this one."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_send_row, args=(name, sender), daemon=True)
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


def _send_row(name: str, sender: Connection) -> None:
    try:
        sender.send(_row(name))
    except Exception as error:  # noqa: BLE001 - any failure is a result
        sender.send(Row(name, failure=f"{type(error).__name__}: {error}".partition("\n")[0]))


def _row(name: str) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compared = compare(folder, ARCHITECTURES[name])
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return Row(name, architecture=architecture, backend=compared.backend, passed=compared.passed)


def _refusal(name: str) -> str:
    """The sentence with which the engine refuses a model, without the name of the file."""
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
    lines = [
        "# Architectures",
        "",
        f"`make archs` wrote this page with transformers {version('transformers')}: {num_green} of {len(rows)} "
        "architectures pass every check.",
        "",
        "For each architecture transformers makes a tiny model with random weights and generates "
        f"{NUM_TOKENS} greedy tokens after each of four prompts, in float32. The engine must generate the same tokens, "
        "with prompts computed *at once* or *chunked* into steps of 7 tokens, all prompts *batched*, *preempted* for "
        "lack of KV blocks, *replayed* by a new engine from the first five tokens, and by *two stages* of a pipeline "
        "with a small pool. The [backend](../models.md#model-backends) is the one that `auto` took when this page was "
        "written.",
        "",
        f"| model type | architecture | backend | {' | '.join(CHECKS)} |",
        f"|{'---|' * (3 + len(CHECKS))}",
    ]
    for row in rows:
        marks = [_MARKS[row.passed.get(check, False)] for check in CHECKS]
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
