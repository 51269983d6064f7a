"""Formats the result of `bench quality` as Markdown: int8 and plain weights, over HTTP and direct. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_bench.markdown import NO_VALUE, number, spread_text, table
from rayloom_bench.quality.forms import FORMS, FormFigures
from rayloom_bench.spread import quotients, spread
from rayloom_bench.variants.rounds import VariantResult

PLAIN, INT8 = FORMS
LEAST_RATIO = 1.5  # goal: W3's tokens per second with int8 weights, divided by those with plain weights
MOST_LOST = 0.01  # goal: largest share by which int8 weights may raise the perplexity


def page(found: Mapping[str, FormFigures], over_http: VariantResult, conditions: str, direct_table: str) -> str:
    """The whole page. `direct_table`: the speeds without HTTP, as the command prints them."""
    parts = [
        "# int8 weights",
        conditions,
        goal_table(found, over_http),
        "## W3 over HTTP",
        "Output tokens per second of one stream. A server with plain weights (*none*) and one with int8 weights run in "
        "turn. Each cell: median of all rounds (minimum to maximum).",
        table(
            ("weights", "out tok/s", "ms per output token"),
            (
                (form, spread_text(spread(tok_s.values())), spread_text(spread(1e3 / each for each in tok_s.values())))
                for form in FORMS
                if (tok_s := over_http.tok_s(form))
            ),
        ),
        "## Without HTTP",
        f"```text\n{direct_table}\n```",
    ]
    if over_http.failures:
        parts += [
            "## Failures",
            "\n".join(f"- {each.name}: {each.reason.splitlines()[0]}" for each in over_http.failures),
        ]
    return "\n\n".join(parts) + "\n"


def goal_table(found: Mapping[str, FormFigures], over_http: VariantResult) -> str:
    """Both goals with their values."""
    ratio = spread(quotients(over_http.tok_s(INT8), over_http.tok_s(PLAIN)))
    worse = found[INT8].perplexity / found[PLAIN].perplexity - 1
    rows = [
        (
            f"W3 over HTTP: at least {LEAST_RATIO}x plain weights",
            spread_text(ratio, "x"),
            "not measured" if ratio is None else _verdict(ratio.median >= LEAST_RATIO),
        ),
        (
            f"perplexity: at most {MOST_LOST:.0%} above plain weights",
            f"{number(found[INT8].perplexity)} against {number(found[PLAIN].perplexity)}, {worse:+.2%}",
            _verdict(worse <= MOST_LOST),
        ),
    ]
    return table(("goal", "value", ""), ((text, value or NO_VALUE, verdict) for text, value, verdict in rows))


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"
