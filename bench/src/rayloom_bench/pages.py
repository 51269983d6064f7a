"""`rayloom-engine bench pages`: all measurements of the CPU engine, one after the other, each with its page.

Runs `bench step`, `bench parallel`, `bench quality`, `bench quantised` and `bench peers`, each in a process of its own.
With the chosen settings the whole run takes about forty minutes. Writes the pages and plots of all parts into the
folder of --page. A part that fails does not stop the others. Prints the seconds of each part; the exit code is 1 if a
part failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.machine import BUSY_WARNING_PERCENT, busy_percent
from rayloom_engine.errors import ConfigError

PAGES = Path("docs/benchmarks")
MOST_PART_S = 1800  # seconds after which a part counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command of the bench."""

    name: str
    page: str
    flags: tuple[str, ...]
    short_flags: tuple[str, ...]  # used instead of `flags` in a short run, whose figures have no meaning

    def command(self, folder: Path, *, is_short: bool) -> list[str]:
        """Returns the command line that runs the part and writes its page into `folder`."""
        flags = self.short_flags if is_short else self.flags
        return [sys.executable, "-m", "rayloom_engine", "bench", self.name, "--page", str(folder), *flags]


PARTS = (
    Part(name="step", page="step.md", flags=(), short_flags=("--repeats", "1")),
    Part(name="parallel", page="parallel.md", flags=("--rounds", "3"), short_flags=("--rounds", "1", "--scale", "0.5")),
    Part(
        name="quality",
        page="int8.md",
        flags=("--dtype", "bfloat16", "--rounds", "2", "--http-rounds", "3"),
        short_flags=("--dtype", "bfloat16", "--rounds", "1", "--http-rounds", "1", "--scale", "0.25"),
    ),
    Part(
        name="quantised",
        page="quantised.md",
        flags=("--rounds", "2", "--scale", "0.5"),
        short_flags=("--rounds", "1", "--scale", "0.125", "--no-answers"),
    ),
    Part(
        name="peers",
        page="peers.md",
        flags=("--rounds", "2"),
        short_flags=("--rounds", "1", "--scale", "0.25", "--no-answers", "--neighbour-seconds", "3"),
    ),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--parts", default=names, help=f"parts, separated by commas; default: {names}")
    parser.add_argument(
        "--page", type=Path, default=PAGES, metavar="FOLDER", help=f"folder of the pages (default {PAGES})"
    )
    parser.add_argument("--short", action="store_true", help="measure a part of everything once, as a trial")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the parts. Returns 0, or 1 if a part failed. Raises ConfigError for a wrong flag."""
    parts = parse_parts(args.parts)
    if not args.page.absolute().parent.is_dir():
        raise ConfigError(f"--page: the folder {args.page.absolute().parent} does not exist; make it first")
    busy = busy_percent()
    if busy > BUSY_WARNING_PERCENT:
        print(f"warning: other processes keep {busy:.0f} % of this machine busy", file=sys.stderr, flush=True)
    lines = []
    codes = []
    for part in parts:
        print(f"bench pages: {part.name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        codes.append(_exit_code(part.command(args.page.absolute(), is_short=args.short)))
        lines.append(summary_line(part, time.perf_counter() - start, codes[-1]))
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return 1 if any(codes) else 0


def parse_parts(names: str) -> tuple[Part, ...]:
    """The parts of a list such as `step,peers`, in the order of PARTS. Raises ConfigError for an unknown name."""
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    known = [part.name for part in PARTS]
    if not chosen or not chosen <= set(known):
        raise ConfigError(f"--parts: {names!r} given; name one or more of {', '.join(known)}, with commas between")
    return tuple(part for part in PARTS if part.name in chosen)


def summary_line(part: Part, seconds: float, code: int) -> str:
    """A line with the part's seconds, and its page or exit code."""
    return f"{part.name:<10}{seconds:>7.0f} s  {part.page if code == 0 else f'FAILED with exit code {code}'}"


def _exit_code(command: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    If this process ends first, it sends the command SIGTERM, so that the command can clean up.
    """
    process = subprocess.Popen(command)
    try:
        return process.wait(MOST_PART_S)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
