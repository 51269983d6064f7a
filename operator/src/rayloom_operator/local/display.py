"""Displays the engine's start-up phases: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from rayloom_operator.engines.status import Phase

_BAR_WIDTH = 20
_QUARTERS = 4


class StartupDisplay:
    """Prints phases to a stream.

    On a terminal, each phase has one line, which is redrawn. Elsewhere a new line is printed when a phase begins, after
    each quarter of its total, and when it ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_drawn = 0
        self._began: dict[str, float] = {}
        self._shown: dict[str, int] = {}  # phase -> last printed quarter; _QUARTERS + 1 after its end

    def update(self, phases: tuple[Phase, ...]) -> None:
        """Prints the current state of the phases. Called several times a second."""
        if self._stream.isatty():
            up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
            print(
                up + "".join(f"\r\x1b[K{self._bar(phase)}\n" for phase in phases), end="", file=self._stream, flush=True
            )
            self._num_drawn = len(phases)
            return
        for phase in phases:
            quarter = phase.done * _QUARTERS // phase.total if phase.total > 0 else 0
            quarter = _QUARTERS + 1 if phase.finished else quarter
            if quarter > self._shown.get(phase.name, -1):
                self._shown[phase.name] = quarter
                print(phase_line(phase), file=self._stream, flush=True)

    def _bar(self, phase: Phase) -> str:
        name = f"{phase.name.replace('_', ' '):<10}: "
        # Seconds are also counted here, because a busy engine may report those of an unfinished phase late.
        elapsed = time.monotonic() - self._began.setdefault(phase.name, time.monotonic())
        seconds = f"{phase.seconds if phase.finished else max(phase.seconds, elapsed):.1f} s"
        if phase.total <= 0:
            return f"{name}{'done in ' if phase.finished else ''}{seconds}"
        part = 1.0 if phase.finished else min(phase.done / phase.total, 1.0)
        return f"{name}{part:4.0%} |{'#' * int(part * _BAR_WIDTH):<{_BAR_WIDTH}}| {_amount(phase)}, {seconds}"


def phase_line(phase: Phase) -> str:
    """Formats a phase as one line: `load: 135.0 of 270.0 MB`, or `load: done in 1.2 s (270.0 MB)`."""
    name = phase.name.replace("_", " ")
    amount = _amount(phase)
    if phase.finished:
        return f"{name}: done in {phase.seconds:.1f} s" + (f" ({amount})" if amount else "")
    return f"{name}: {amount}" if amount else f"{name} ..."


def _amount(phase: Phase) -> str:
    if phase.total <= 0:
        return ""
    if phase.unit in ("B", "byte", "bytes"):
        done = f"{phase.done / 1e6:.1f}"
        total = f"{phase.total / 1e6:.1f} MB"
    else:
        done = str(phase.done)
        total = f"{phase.total} {phase.unit}".rstrip()
    return total if phase.finished else f"{done} of {total}"
