"""The table on file: the figures of each kernel on each GPU, and the version of the code that had these figures."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_gate.machine_code import Figures

TABLE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "kernels.csv"
_COLUMNS = ("kernel", "gpu", "registers", "spilled_bytes", "shared_bytes", "matrix", "async_copies", "triton", "source")

Key = tuple[str, str]  # (name of the configuration, GPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    figures: Figures
    version: str  # Triton's version and a checksum of the source, joined by "/"


def read_table(path: Path) -> dict[Key, Entry]:
    """Returns the entries of the table; an empty map if there is no file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {(line["kernel"], line["gpu"]): _entry(line) for line in csv.DictReader(file)}


def write_table(path: Path, entries: Mapping[Key, Entry]) -> None:
    """Replaces the file. Lines are sorted, so that a change of one kernel changes only the lines of this kernel."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for (kernel, gpu), entry in sorted(entries.items()):
            figures = entry.figures
            counts = (figures.registers, figures.spilled_bytes, figures.shared_bytes)
            writer.writerow((kernel, gpu, *counts, figures.matrix, figures.async_copies, *entry.version.split("/")))
    new.replace(path)


def _entry(line: Mapping[str, str]) -> Entry:
    figures = Figures(
        registers=int(line["registers"]),
        spilled_bytes=int(line["spilled_bytes"]),
        shared_bytes=int(line["shared_bytes"]),
        matrix=line["matrix"],
        async_copies=int(line["async_copies"]),
    )
    return Entry(figures=figures, version=f"{line['triton']}/{line['source']}")
