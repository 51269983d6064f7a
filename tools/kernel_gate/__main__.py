"""Compiles Triton kernels for GPUs that this machine lacks, and compares the machine code with the figures on file.

    make kernels [ALL=1] [ARGS="--seed 7 --record"]

A row of the table is one kernel configuration on one GPU. By default, the tool compiles the rows whose code or Triton
version changed, and a random tenth of the other rows. --record writes the figures of the compiled rows to the table,
and removes rows that are no longer shipped. A kernel that breaks a limit (`verdict.py`) is an error with --record, too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kernel_gate import verdict
from kernel_gate.compiler import VERSION, compiled_figures
from kernel_gate.machine_code import Figures
from kernel_gate.rows import Row, all_rows, rows_to_compile, source_version
from kernel_gate.table import TABLE, Entry, read_table, write_table
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

Compile = Callable[[Shipped, Gpu], Figures]


def check(
    rows: Sequence[Row], table: Path, *, is_all: bool, record: bool, seed: int, compile_row: Compile = compiled_figures
) -> list[str]:
    """Compiles rows, prints a line for each, and returns a sentence for each problem."""
    versions = {row.key: f"{VERSION}/{source_version(row.shipped)}" for row in rows}
    entries = read_table(table)
    recorded = {key: entry.version for key, entry in entries.items()}
    found: list[str] = []
    gone = [key for key in entries if key not in versions]
    if record:
        entries = {key: entry for key, entry in entries.items() if key in versions}
    else:
        found += [verdict.superfluous(*key) for key in gone]
    chosen = rows if is_all else rows_to_compile(rows, recorded, versions, seed)
    print(f"kernels: {len(chosen)} of {len(rows)} rows, seed {seed}, Triton {VERSION}", flush=True)
    for row in chosen:
        started = _cpu_seconds()
        try:
            figures = compile_row(row.shipped, row.gpu)
        except Exception as error:  # noqa: BLE001 - the compiler raises exceptions of many kinds
            found.append(f"{row.shipped.name} on {row.gpu}: does not compile: {type(error).__name__}: {error}")
            continue
        entry = entries.get(row.key)
        is_known = entry is not None and entry.version == versions[row.key]
        found += verdict.problems(
            row.shipped, row.gpu, figures, entry.figures if entry is not None and is_known and not record else None
        )
        if record:
            entries[row.key] = Entry(figures=figures, version=versions[row.key])
            write_table(table, entries)  # after each row, so that an interrupted run loses no work
        elif not is_known:
            found.append(verdict.missing(*row.key))
        print(f"  {row.shipped.name} {row.gpu}: {figures} ({_cpu_seconds() - started:.1f} s of CPU)", flush=True)
    return found


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and of the tools that it ran."""
    return sum(os.times()[:4])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile every row")
    parser.add_argument("--record", action="store_true", help="write the figures of the compiled rows to the table")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the random tenth")
    chosen = parser.parse_args()
    found = check(all_rows(), TABLE, is_all=chosen.all, record=chosen.record, seed=chosen.seed)
    for sentence in found:
        print(f"kernels: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
