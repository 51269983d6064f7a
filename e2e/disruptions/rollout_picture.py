"""Draws a rollout: its steps, its engine replicas, and the time to the first token of every request.

`ROLL_PLOT=1 make e2e ARGS="-k 'argument or fails_requests'"` writes docs/images/roll.svg and rollback.svg.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from disruptions.rollout_under_load import RolloutRecord
from observers.rollout_timeline import CLUSTER_DELETED, Engine

_FOLDER = Path(__file__).parents[2] / "docs" / "images"

# Pixels.
_WIDTH, _LEFT, _RIGHT = 960, 150, 20
_TOP, _STEP, _LANE, _REQUESTS, _BOTTOM = 34, 30, 34, 170, 94
_BEFORE_S = 5.0  # the picture begins this many seconds before the change

_STEP_COLOURS = ("#e8eef7", "#f4efe3")
_COLOURS = {
    "starts": "#b8bcc4",
    "serves, gets no requests": "#a9cfee",
    "gets requests": "#2f7fc1",
    "finishes its requests": "#e8a33d",
    "is deleted": "#d9c7ad",
    "first token of a stream": "#2f7fc1",
    "request failed": "#c62828",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an engine's life. Seconds count from the change."""

    begin: float
    end: float
    what: str  # a key of _COLOURS


@dataclass(frozen=True, slots=True)
class Picture:
    """The content of a picture. Seconds count from the change."""

    title: str
    begin: float
    end: float
    steps: Sequence[tuple[float, str]]
    lanes: Sequence[tuple[str, Sequence[Span]]]
    first_tokens: Sequence[tuple[float, float]]  # time of a request, and its seconds to the first token
    failures: Sequence[float]  # times of failed requests


def plotted(seen: RolloutRecord, name: str) -> None:
    """Writes docs/images/NAME.svg if ROLL_PLOT is set."""
    if os.environ.get("ROLL_PLOT"):
        _FOLDER.mkdir(exist_ok=True)
        (_FOLDER / f"{name}.svg").write_text(svg(picture(seen)))


def picture(seen: RolloutRecord) -> Picture:
    timeline = seen.timeline
    at, end = timeline.seconds, timeline.seconds(seen.over_at)
    revisions: dict[str, str] = {}
    lanes = []
    for engine in sorted(timeline.engines.values(), key=lambda each: (each.made_at, each.name)):
        revisions.setdefault(engine.revision, ("old", "new")[min(len(revisions), 1)])
        spans = [Span(at(span.begin), at(span.end), span.what) for span in _life(engine, seen.over_at)]
        lanes.append((f"{revisions[engine.revision]} engine {engine.name.rpartition('-')[2]}", spans))
    return Picture(
        title=f"Seconds from the change: {seen.what}",
        begin=max(-_BEFORE_S, at(timeline.steps[0][0])),
        end=end,
        steps=[(at(since), word) for since, word in timeline.steps],
        lanes=lanes,
        first_tokens=[(at(each["began"]), each["times"][0] - each["began"]) for each in seen.streams if each["times"]],
        failures=[at(failure.began) for failure in seen.failures],
    )


def _life(engine: Engine, until: float) -> Iterator[Span]:
    """The spans of an engine's life, in Unix time."""
    end = engine.gone_at or until
    deleted_at = next((at for at, what in engine.touches if what == CLUSTER_DELETED), end)
    token_at = engine.token_seen_at or end
    moments = [*engine.routes, (end, False)]
    if engine.routed_at is None or engine.routed_at > engine.made_at:
        yield Span(engine.made_at, token_at, "starts")
        yield Span(token_at, engine.routed_at or end, "serves, gets no requests")
    was_routed = False
    for (begin, is_routed), (following, _) in itertools.pairwise(moments):
        if is_routed:
            yield Span(begin, following, "gets requests")
        elif was_routed:
            yield Span(begin, min(deleted_at, following), "finishes its requests")
        was_routed = was_routed or is_routed
    yield Span(deleted_at, end, "is deleted")


def svg(drawn: Picture) -> str:
    """The picture as an SVG document."""
    height = _TOP + _STEP + _LANE * len(drawn.lanes) + _REQUESTS + _BOTTOM
    parts = [*_steps(drawn, height), *_lanes(drawn), *_requests(drawn), *_axis(drawn, height), *_legend(height)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
    )
    back = f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    title = _text(_LEFT, 20, drawn.title, 'font-size="14" font-weight="bold"')
    return "\n".join([head, back, title, *parts, "</svg>"]) + "\n"


def _steps(drawn: Picture, height: int) -> Iterator[str]:
    ends = [*(at for at, _ in drawn.steps[1:]), drawn.end]
    shown = [(max(at, drawn.begin), end, word) for (at, word), end in zip(drawn.steps, ends, strict=True)]
    for number, (begin, end, word) in enumerate(each for each in shown if each[1] > drawn.begin):
        left, right = _x(drawn, begin), _x(drawn, end)
        colour = _STEP_COLOURS[number % len(_STEP_COLOURS)]
        yield _box(left, _TOP, right - left, height - _TOP - _BOTTOM, colour)
        if right - left > 6.0 * len(word):
            yield _text(left + 3, _TOP + 18, word, 'font-size="11"')
    yield _text(8, _TOP + 18, "step")


def _lanes(drawn: Picture) -> Iterator[str]:
    for number, (name, spans) in enumerate(drawn.lanes):
        top = _TOP + _STEP + number * _LANE
        yield _text(8, top + 20, name)
        for span in spans:
            left, right = _x(drawn, max(span.begin, drawn.begin)), _x(drawn, min(span.end, drawn.end))
            if right > left:
                yield _box(left, top + 8, right - left, _LANE - 16, _COLOURS[span.what])


def _requests(drawn: Picture) -> Iterator[str]:
    top = _TOP + _STEP + len(drawn.lanes) * _LANE + 10
    bottom = top + _REQUESTS - 20
    most = float(math.ceil(max([1.0, *(seconds for _, seconds in drawn.first_tokens)])))
    yield _text(8, top + 12, "seconds to")
    yield _text(8, top + 27, "the first token")
    for part in (0.0, 0.5, 1.0):
        y = bottom - part * (bottom - top)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ccc"/>'
        yield _text(_LEFT - 6, y + 4, f"{part * most:.1f}", 'text-anchor="end"')
    for at, seconds in drawn.first_tokens:
        if drawn.begin <= at <= drawn.end:
            y = bottom - seconds / most * (bottom - top)
            yield _dot(_x(drawn, at), y)
    for at in drawn.failures:
        yield _cross(_x(drawn, at), bottom - 5)


def _axis(drawn: Picture, height: int) -> Iterator[str]:
    y = height - _BOTTOM + 16
    step = next(each for each in (5, 10, 20, 50, 100, 1000) if (drawn.end - drawn.begin) / each <= 14)
    for at in range(0, int(drawn.end) + 1, step):
        yield _text(_x(drawn, at), y, f"{at}", 'text-anchor="middle"')
        yield f'<line x1="{_x(drawn, at):.1f}" y1="{y - 15}" x2="{_x(drawn, at):.1f}" y2="{y - 11}" stroke="#222"/>'


def _legend(height: int) -> Iterator[str]:
    for number, (what, colour) in enumerate(_COLOURS.items()):
        x, y = _LEFT + number % 3 * 250, height - 54 + number // 3 * 20
        if what == "request failed":
            yield _cross(x + 6, y - 4)
        elif what == "first token of a stream":
            yield _dot(x + 6, y - 4)
        else:
            yield _box(x, y - 10, 12, 12, colour)
        yield _text(x + 18, y, what)


def _x(drawn: Picture, at: float) -> float:
    return _LEFT + (at - drawn.begin) / (drawn.end - drawn.begin) * (_WIDTH - _LEFT - _RIGHT)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS["first token of a stream"]}"/>'


def _cross(x: float, y: float) -> str:
    path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
    return f'<path d="{path}" stroke="{_COLOURS["request failed"]}" stroke-width="2"/>'


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
