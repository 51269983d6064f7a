"""Draws the plots of the page with matplotlib, which is an optional dependency: `pip install './bench[plots]'`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayloom_bench.peers.report import comparison
from rayloom_bench.peers.report.page import ROOFLINE_PLOT, THROUGHPUT_PLOT
from rayloom_bench.peers.report.roofline import LIMIT, Curve, decode_curves, prefill_curves
from rayloom_bench.spread import spread
from rayloom_bench.step.plot import log_range, y_ticks
from rayloom_engine.errors import ConfigError

if TYPE_CHECKING:
    from rayloom_bench.peers.result import PeersResult

COLORS = ("#1f6f8b", "#d1495b", "#66a182", "#8d96a3", "#edae49")
LIMIT_COLOR = "#222222"
LEGEND_COLUMNS = 3


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--page draws plots with matplotlib, which is missing: pip install './bench[plots]', or add --no-plots"
        ) from error


def draw(result: PeersResult, folder: Path) -> None:
    """Writes THROUGHPUT_PLOT, and ROOFLINE_PLOT if there are sweeps, into `folder`. Equal results give equal bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # SVG ids are fixed and the date is left out, so that a plot changes only with its figures.
    settings: dict[Any, Any] = {"svg.hashsalt": "rayloom", "svg.fonttype": "none", "font.size": 10}
    with matplotlib.rc_context(settings):
        figure = _throughput(result, pyplot)
        figure.savefig(folder / THROUGHPUT_PLOT, metadata={"Date": None})
        pyplot.close(figure)
        if result.sweep_turns:
            figure = _rooflines(result, pyplot)
            figure.savefig(folder / ROOFLINE_PLOT, metadata={"Date": None})
            pyplot.close(figure)


def _throughput(result: PeersResult, pyplot: Any) -> Any:
    """Returns a figure with a panel for each workload. A bar shows the median of an engine's rounds, an error bar their
    range, and a line the machine's limit.
    """
    figure, axes = pyplot.subplots(
        1, len(result.workloads), figsize=(max(9, 2.4 * len(result.workloads)), 3.6), squeeze=False
    )
    for axis, workload in zip(axes[0], result.workloads, strict=True):
        for position, (engine, facts) in enumerate(result.engines.items()):
            values = comparison.tok_s_by_round(result, engine, workload.name).values()
            found = spread(values)
            if found is None:
                continue
            axis.bar(position, found.median, color=COLORS[position % len(COLORS)], label=facts.title)
            axis.vlines(position, found.smallest, found.largest, color=LIMIT_COLOR, linewidth=1)
        limit = comparison.limit_tok_s(result, workload)
        if limit is not None:
            axis.axhline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1, label=LIMIT)
        axis.set_title(workload.name)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("output tokens per second")
    _legend(figure, axes[0])
    return figure


def _rooflines(result: PeersResult, pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    _curves(axes[0], decode_curves(result), "decode", "batch size", "output tokens per second")
    _curves(axes[1], prefill_curves(result), "prefill", "prompt tokens", "prompt tokens per second")
    _legend(figure, axes)
    return figure


def _curves(axis: Any, curves: tuple[Curve, ...], title: str, x_label: str, y_label: str) -> None:
    if not curves:
        return
    for number, curve in enumerate(curves):
        is_limit = curve.label == LIMIT
        axis.plot(
            curve.x,
            curve.tok_s,
            label=curve.label,
            color=LIMIT_COLOR if is_limit else COLORS[number % len(COLORS)],
            linestyle="--" if is_limit else "-",
            marker="" if is_limit else "o",
        )
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", subs=())  # no minor ticks; the major ticks are set below
    ys = [tok_s for curve in curves for tok_s in curve.tok_s]
    low, high = log_range(min(ys), max(ys))
    axis.set_ylim(low, high * 1.1)
    axis.set_yticks(y_ticks(low, high, is_log=True))
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.set_xticks(sorted({x for curve in curves for x in curve.x}))
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(True, which="both", linewidth=0.3)


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels, below them."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=LEGEND_COLUMNS, frameon=False)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
