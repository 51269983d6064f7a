"""Formats the result of `bench parallel` as Markdown: each layout compared with one rank of the same round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_bench.markdown import NO_VALUE, number, spread_text, table
from rayloom_bench.parallel.layouts import Layout, variant_name
from rayloom_bench.spread import Spread, quotients, spread
from rayloom_bench.variants.rounds import VariantResult

HEADER = ("weights", "ranks", "out tok/s", "ms per output token", "x one rank", "goal", "", "communication")


def page(result: VariantResult, layouts: Sequence[Layout], dtypes: Sequence[str], conditions: str) -> str:
    """The whole page."""
    parts = [
        "# Several ranks on the same cores",
        conditions,
        "*x one rank*: seconds per output token of W1, divided by those of one rank in the same round. All ranks share "
        "the same cores, so this is the cost of dividing a model. A pipeline of two stages has two batches in flight. "
        "*Communication*: mean fraction of wall time that a rank spends in sums, in gathers and waiting for other "
        "ranks. Each cell: median of all rounds (minimum to maximum).",
        layout_table(result, layouts, dtypes),
    ]
    if result.failures:
        parts += ["## Failures", "\n".join(f"- {each.name}: {each.reason.splitlines()[0]}" for each in result.failures)]
    return "\n\n".join(parts) + "\n"


def layout_table(result: VariantResult, layouts: Sequence[Layout], dtypes: Sequence[str]) -> str:
    """A row for each type of weights and each layout."""
    return table(HEADER, (_row(result, layout, layouts, dtype) for dtype in dtypes for layout in layouts))


def ratio(result: VariantResult, layout: Layout, layouts: Sequence[Layout], dtype: str) -> Spread | None:
    """The layout's seconds per output token, divided by the seconds of one rank with the same model."""
    base = next(each for each in layouts if each.max_ratio is None and each.has_narrow_heads == layout.has_narrow_heads)
    return spread(quotients(result.tok_s(variant_name(base, dtype)), result.tok_s(variant_name(layout, dtype))))


def _row(result: VariantResult, layout: Layout, layouts: Sequence[Layout], dtype: str) -> tuple[str, ...]:
    tok_s = result.tok_s(variant_name(layout, dtype))
    ms_per_token = spread(1e3 / value for value in tok_s.values())
    cells = (dtype, layout.name, spread_text(spread(tok_s.values())), spread_text(ms_per_token))
    if layout.max_ratio is None:
        return (*cells, "", "", "", "")
    found = ratio(result, layout, layouts, dtype)
    samples = result.samples.get(variant_name(layout, dtype), {})
    waiting = spread(100 * sample.communication for sample in samples.values())
    verdict = "not measured" if found is None else "met" if found.median <= layout.max_ratio else "missed"
    share = NO_VALUE if waiting is None else f"{number(waiting.median)} %"
    return (*cells, spread_text(found, "x"), f"at most {layout.max_ratio:g}x", verdict, share)
