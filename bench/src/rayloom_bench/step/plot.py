"""Draws panels side by side as SVG, without a library: axes, ticks, a line with points for each series, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rayloom_bench.step.sweeps import LIMIT, Panel

WIDTH, HEIGHT = 340, 280  # size of a panel in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 48, 66
COLORS = ("#1f6f8b", "#d1495b", "#66a182")
LIMIT_COLOR = "#222222"


class Scale:
    """Maps values in [low, high] to pixels [start, end], linearly or logarithmically."""

    def __init__(self, low: float, high: float, pixels: tuple[float, float], *, is_log: bool) -> None:
        self.is_log = is_log
        self._low, self._high = self._of(low), self._of(high)
        if self._low == self._high:
            self._high += 1.0
        self._pixels = pixels

    def __call__(self, value: float) -> float:
        start, end = self._pixels
        return start + (end - start) * (self._of(value) - self._low) / (self._high - self._low)

    def _of(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def draw(panels: Sequence[Panel], title: str) -> str:
    """Returns an SVG document. The same panels give the same bytes."""
    body = [f'<text x="{LEFT}" y="16">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        body.append(f'<g transform="translate({number * WIDTH},0)">{"".join(_panel(panel))}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panel(panel: Panel) -> list[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    to_x = Scale(min(xs), max(xs), (LEFT, WIDTH - RIGHT), is_log=panel.is_log)
    low, high = log_range(min(ys), max(ys)) if panel.is_log else (0.0, max(ys))
    ticks = y_ticks(low, high, is_log=panel.is_log)
    high = max(high, ticks[-1])
    to_y = Scale(low, high, (HEIGHT - BOTTOM, TOP), is_log=panel.is_log)
    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in ticks:
        y = to_y(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x in sorted(set(xs)):
        parts.append(f'<text x="{to_x(x):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{x}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - BOTTOM + 30}" text-anchor="middle">{escape(panel.x_label)}</text>')
    vertical = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(12,{vertical}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>'
    )
    for number, line in enumerate(panel.lines):
        color = LIMIT_COLOR if line.label == LIMIT else COLORS[number % len(COLORS)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        dash = "" if number == 0 else ' stroke-dasharray="5 3"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dash}/>')
        if number == 0:
            parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.5" fill="{color}"/>' for x, y in line.points]
        x, y = LEFT + min(130, (WIDTH - LEFT) // len(panel.lines)) * number, HEIGHT - 14
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{color}"{dash}/>')
        parts.append(f'<text x="{x + 23}" y="{y}">{escape(line.label)}</text>')
    return parts


def log_range(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis around `low` and `high`: the nearest values that are 1, 2 or 5 times a power of ten."""
    powers = [10.0**exponent for exponent in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)]
    values = [factor * power for power in powers for factor in (1, 2, 5)]
    return max(value for value in values if value <= low), min(value for value in values if value >= high)


def y_ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Ticks at round values: 1, 2 and 5 times powers of ten in [low, high] on a log axis, else five steps from 0."""
    if is_log:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
        return [value for value in values if low <= value <= high] or [low, high]
    power = 10.0 ** math.floor(math.log10(high / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= high)
    return [step * number for number in range(6)]
