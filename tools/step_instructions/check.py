"""Counts the instructions of fixed steps on the C library. Fails if a step needs 10 % more than the number on file.

    .venv/bin/python tools/step_instructions/check.py [--record]

A count does not depend on the load of the machine. valgrind executes the AVX2 kernels, because it does not know
AVX-512; both are made of the same sources. The difference of two runs with different numbers of steps leaves out start
and loading. Numbers hold for one compiler, whose version is on file: with another one the counts are printed alone.
--record writes the present counts to instructions.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rayloom_engine.cpu_library.build import find_compiler, source_folder
from rayloom_engine.cpu_library.finding import find_library

FOLDER = Path(__file__).parent
NUMBERS = FOLDER / "instructions.json"
INSTRUCTION_SET = "avx2"
WORKLOADS = ("decode", "prefill", "decode-int8", "prefill-int8")  # of steps.cpp
MOST_LOST = 0.10  # share of the instructions on file


def losses(expected: Mapping[str, int], counted: Mapping[str, int], most_lost: float = MOST_LOST) -> list[str]:
    """Returns a sentence for each workload that needs more than `most_lost` more instructions, or is not on file."""
    found = []
    for workload, count in counted.items():
        before = expected.get(workload)
        if before is None:
            found.append(f"{workload}: no number is on file; run with --record")
        elif count > before * (1 + most_lost):
            share = 100 * (count / before - 1)
            found.append(f"{workload}: {count:,} instructions a step, {share:.1f} % more than the {before:,} on file")
    return found


def instructions_of_step(program: Path, library: Path, workload: str) -> int:
    """Returns the instructions of one step: the difference between runs of two steps and of one."""
    of_one, of_two = (_instructions(program, library, workload, count) for count in (1, 2))
    return of_two - of_one


def _instructions(program: Path, library: Path, workload: str, count: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += [str(program), str(library), INSTRUCTION_SET, workload, str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or collected is None:
        raise SystemExit(f"bench-check: {' '.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return int(collected[1])


def _compiler_version(compiler: str) -> str:
    done = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the present counts to the file of numbers")
    record = parser.parse_args().record
    compiler = find_compiler(os.environ)
    library = find_library(Path(tempfile.gettempdir()), os.environ).path
    if compiler is None or library is None or shutil.which("valgrind") is None:
        print("bench-check: not run, because it needs a C++ compiler, the compiled library and valgrind")
        return 0
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "steps"
        flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{source_folder()}")
        subprocess.run([*shlex.split(compiler), *flags, str(FOLDER / "steps.cpp"), "-o", str(program), "-ldl"], check=True)
        counted = {workload: instructions_of_step(program, library, workload) for workload in WORKLOADS}
    version = _compiler_version(compiler)
    if record:
        NUMBERS.write_text(json.dumps({"compiler": version, "instructions": counted}, indent=2) + "\n")
    on_file = json.loads(NUMBERS.read_text())
    expected: dict[str, int] = on_file["instructions"]
    for workload, count in counted.items():
        print(f"{workload:14} {count:>12,} instructions a step, on file {expected.get(workload, 0):>12,}")
    if on_file["compiler"] != version:
        print(f"bench-check: not compared. The numbers are of {on_file['compiler']!r}, and this is {version!r}.")
        return 0
    lost = losses(expected, counted)
    for line in lost:
        print(f"bench-check: {line}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
