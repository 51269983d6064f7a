"""Counts the instructions of fixed steps on the C library. Fails if a step needs 10 % more than the number on file.

    .venv/bin/python tools/step_instructions/check.py [--record]

A count does not depend on the load of the machine. valgrind does not know AVX-512, so it executes the AVX2 kernels,
which have the same sources. The start and the loading do not count, because a figure is the difference of two runs with
different numbers of steps. Compilers give different counts, so instructions.json has numbers for each compiler. The
check fails if the file has no numbers for the library's compiler, or if a tool is missing. --record adds the present
counts.
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
from collections.abc import Collection, Mapping
from pathlib import Path

from rayloom_engine.cpu_library.build import find_compiler, source_folder
from rayloom_engine.cpu_library.finding import find_library

FOLDER = Path(__file__).parent
NUMBERS = FOLDER / "instructions.json"
INSTRUCTION_SET = "avx2"
FORMS = ("", "-int8", "-q8", "-q4")  # suffixes of the workloads' names in steps.cpp
WORKLOADS = tuple(f"{step}{form}" for form in FORMS for step in ("decode", "prefill"))
MOST_LOST = 0.10  # as a share of the instructions on file


def losses(expected: Mapping[str, int], counted: Mapping[str, int], most_lost: float = MOST_LOST) -> list[str]:
    """Returns a sentence for each workload that is not on file, or whose instructions grew by more than `most_lost`."""
    found = []
    for workload, count in counted.items():
        before = expected.get(workload)
        if before is None:
            found.append(f"{workload}: no number is on file; run with --record")
        elif count > before * (1 + most_lost):
            share = 100 * (count / before - 1)
            found.append(f"{workload}: {count:,} instructions a step, {share:.1f} % more than the {before:,} on file")
    return found


def compiler_of(library: bytes) -> str:
    """Returns the compiler and its version, as the compiler wrote them into the library. Raises ValueError."""
    found = sorted(set(re.findall(rb"GCC: \([^)\0]*\) [0-9.]+|[A-Za-z ]*clang version [^\0]+", library)))
    if not found:
        raise ValueError("the library names no compiler; compile it with GCC or clang")
    return " and ".join(name.decode(errors="replace").strip() for name in found)


def no_record(compiler: str, on_file: Collection[str]) -> str:
    """Returns the message for a compiler without numbers on file: the compilers with numbers, and what to do."""
    known = ", ".join(repr(name) for name in sorted(on_file)) or "no compiler"
    return (
        f"there are no numbers for {compiler!r}, only for {known}, so nothing was compared. Compile with one of these, "
        "or record the numbers of this compiler: check out the revision to compare with, run "
        "`make bench-check ARGS=--record` there, and keep its instructions.json"
    )


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


def _fail(reason: str) -> int:
    print(f"bench-check: {reason}", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the present counts to the file of numbers")
    record = parser.parse_args().record
    compiler = find_compiler(os.environ)
    found = find_library(Path(tempfile.gettempdir()), os.environ)
    if compiler is None:
        return _fail("needs a C++ compiler for its own program; install g++, or name a compiler in CXX")
    if found.path is None:
        return _fail(f"needs the compiled library, but {found.problem}")
    if shutil.which("valgrind") is None:
        return _fail("needs valgrind, which is not on the PATH; install it with the system's packages")
    built_by = compiler_of(found.path.read_bytes())
    numbers: dict[str, dict[str, int]] = json.loads(NUMBERS.read_text())
    print(f"bench-check: the library was compiled by {built_by!r}")
    if not record and built_by not in numbers:
        return _fail(no_record(built_by, numbers))
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "steps"
        flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{source_folder()}")
        command = [*shlex.split(compiler), *flags, str(FOLDER / "steps.cpp"), "-o", str(program), "-ldl"]
        subprocess.run(command, check=True)
        counted = {workload: instructions_of_step(program, found.path, workload) for workload in WORKLOADS}
    if record:
        numbers[built_by] = counted
        NUMBERS.write_text(json.dumps(numbers, indent=2, sort_keys=True) + "\n")
    expected = numbers[built_by]
    for workload, count in counted.items():
        print(f"{workload:14} {count:>12,} instructions a step, on file {expected.get(workload, 0):>12,}")
    lost = losses(expected, counted)
    for line in lost:
        print(f"bench-check: {line}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
