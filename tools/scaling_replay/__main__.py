"""Replays the reduced traces under fixed fleets, Knative's rule and the operator's scaler, and prints a table.

PYTHONPATH=tools .venv/bin/python -m scaling_replay            prints the table
PYTHONPATH=tools .venv/bin/python -m scaling_replay --write    writes it into docs/autoscaling.md
... --reduce conv=azure_conv_2023.csv.gz,code=...              makes the reduced traces again
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rayloom_bench.markdown import table
from scaling_replay.fleet import Outcome, replay
from scaling_replay.rules import Fixed, Kpa, Rule, Scaler
from scaling_replay.traces import FILE, Shape, reduce, requests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "autoscaling.md"
BEGIN, END = "<!-- replay -->", "<!-- end -->"
_HEADER = (
    "trace",
    "rule",
    "seconds over the goal",
    "requests over it",
    "TTFT p50, p99",
    "replica-hours",
    "most engines",
)
MOST = 12
TTFT_S = 2.0
START_S = 60.0
# Name of a row -> its requests, and the sizes of the fixed fleets that serve them.
CASES = {
    "conversation, one hour": (Shape(trace="conv", factor=2), (4, 5)),
    "conversation, a day in 6 hours": (Shape(trace="conv", factor=4, hours=6, night=0.1), (5, 8, 10)),
    "code, one hour": (Shape(trace="code"), (2, 3, 5)),
}


def outcomes(name: str, seed: int = 1) -> list[Outcome]:
    """Returns the outcome of each rule for one row of CASES."""
    shape, sizes = CASES[name]
    found = requests(shape, seed)
    rules: list[Rule] = [Fixed(size) for size in sizes]
    rules += [Kpa(44.8, MOST), Kpa(24, MOST), Scaler(MOST, TTFT_S)]
    return [replay(found, rule, start_s=START_S, ttft_s=TTFT_S) for rule in rules]


def rows() -> Iterator[tuple[str, ...]]:
    """Yields the cells of the table, for each trace and rule."""
    for name in CASES:
        for each in outcomes(name):
            ttft = f"{each.ttft_p50_s:.2f} s, {each.ttft_p99_s:.1f} s"
            over = (str(each.seconds_over), f"{each.percent_over:.1f} %")
            yield name, each.rule, *over, ttft, f"{each.replica_hours:.2f}", str(each.most)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scaling_replay", description="Replays traces under rules of autoscaling.")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--reduce", metavar="NAME=FILE,...", help="make the reduced traces from the original files")
    flags = parser.parse_args()
    if flags.reduce:
        pairs = (each.partition("=") for each in flags.reduce.split(","))
        FILE.write_text(reduce({name: Path(path) for name, _, path in pairs}), encoding="utf-8")
    text = table(_HEADER, rows())
    print(text)
    if flags.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
