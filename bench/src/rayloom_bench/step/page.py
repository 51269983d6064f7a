"""Formats the tables and sweeps of `bench step` as a Markdown page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayloom_bench.markdown import NO_VALUE, number, table
from rayloom_bench.step.sweeps import LIMIT, MEASURED, TOKEN_PANEL, Panel

PLOT = "step.svg"
MOST_TOKEN_RATIO = 1.1  # goal: most time of a decoded token at a long context, as a multiple of the expected time


def page(conditions: str, tables: Mapping[str, str], panels: Sequence[Panel]) -> str:
    """The whole page. `tables`: title -> the phases of a step, as the command prints them."""
    parts = ["# Where a step goes, beside the machine's limit", conditions]
    if panels:
        parts += [f"![Decode, prefill and one token beside the limit]({PLOT})"]
    for panel in panels:
        parts += [f"## {panel.title.capitalize()}", growth(panel) if panel.title == TOKEN_PANEL else shares(panel)]
    for title, text in tables.items():
        parts += [f"## Phases: {title}", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def shares(panel: Panel) -> str:
    """A row for each measured point, with the share of the limit that it reaches. The panel must have a limit."""
    lines = {line.label: dict(line.points) for line in panel.lines}
    measured, limit = lines[MEASURED], lines[LIMIT]
    rows = ((str(x), number(measured[x]), number(limit[x]), f"{measured[x] / limit[x]:.0%}") for x in measured)
    return table((panel.x_label, panel.y_label, LIMIT, "share"), rows)


def growth(panel: Panel) -> str:
    """The cost of one decoded token by context: measured, and expected if only the reads of keys and values grow.

    The expected time is the time measured at the first context, plus the time in which the machine reads the additional
    keys and values.
    """
    lines = {line.label: dict(line.points) for line in panel.lines}
    measured = lines.pop(MEASURED)
    (expected,) = lines.values()
    first = next(iter(measured))
    rows = []
    for context, milliseconds in measured.items():
        ratio = milliseconds / expected[context]
        goal = (NO_VALUE, "") if context == first else (f"at most {MOST_TOKEN_RATIO:g}x", _verdict(ratio))
        rows.append(
            (
                str(context),
                f"{milliseconds:.2f}",
                f"{expected[context]:.2f}",
                f"+{milliseconds - measured[first]:.2f}",
                f"+{expected[context] - expected[first]:.2f}",
                f"{ratio:.2f}x",
                *goal,
            )
        )
    header = (
        "context",
        "ms",
        "expected ms",
        "ms more than at the first",
        "expected more",
        "measured / expected",
        "goal",
        "result",
    )
    return table(header, rows)


def _verdict(ratio: float) -> str:
    return "met" if ratio <= MOST_TOKEN_RATIO else "missed"
