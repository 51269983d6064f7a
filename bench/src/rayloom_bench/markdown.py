"""Tables and numbers of the pages that the bench writes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayloom_bench.spread import Spread

NO_VALUE = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def spread_text(spread: Spread | None, unit: str = "") -> str:
    """Returns the median with its unit, followed by (minimum to maximum) if the values differ."""
    if spread is None:
        return NO_VALUE
    if spread.smallest == spread.largest:
        return number(spread.median) + unit
    return f"{number(spread.median)}{unit} ({number(spread.smallest)} to {number(spread.largest)})"


def number(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
