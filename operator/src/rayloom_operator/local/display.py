"""Displays the start-up phases of one or several engines: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rayloom_operator.engines.status import EngineStatus, Phase

_BAR_WIDTH = 20
_QUARTERS = 4


class StartupDisplay:
    """Prints phases to a stream.

    On a terminal, each phase of a single engine has a line, which is redrawn. If there are several processes, each
    process has a line with its current phase. On any other stream, a new line is printed when a phase begins, after
    each quarter of its total, and when the phase ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_drawn = 0
        self._began: dict[str, float] = {}
        self._shown: dict[str, int] = {}  # phase -> last printed quarter; _QUARTERS + 1 after its end

    def update(self, phases: tuple[Phase, ...]) -> None:
        """Prints the current state of a single engine's phases. Called several times a second."""
        if self._stream.isatty():
            self._draw([self._bar("", phase) for phase in phases])
        else:
            self._print_new("", phases)

    def update_all(self, statuses: Mapping[str, EngineStatus | None]) -> None:
        """Prints the current phase of each process, by name. A status is None while the process does not answer."""
        if self._stream.isatty():
            self._draw([self._row(name, status) for name, status in statuses.items()])
            return
        for name, status in statuses.items():
            if status is not None:
                self._print_new(f"{name}: ", status.startup)
            if status is not None and status.state == "serving" and name not in self._shown:
                self._shown[name] = 0
                print(f"{name}: serving", file=self._stream, flush=True)

    def _draw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        print(up + "".join(f"\r\x1b[K{line}\n" for line in lines), end="", file=self._stream, flush=True)
        self._num_drawn = len(lines)

    def _print_new(self, prefix: str, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            key = prefix + phase.name
            quarter = phase.done * _QUARTERS // phase.total if phase.total > 0 else 0
            quarter = _QUARTERS + 1 if phase.finished else quarter
            if quarter > self._shown.get(key, -1):
                self._shown[key] = quarter
                print(prefix + phase_line(phase), file=self._stream, flush=True)

    def _row(self, name: str, status: EngineStatus | None) -> str:
        if status is None:
            return f"{name}  starting"
        unfinished = [phase for phase in status.startup if not phase.finished]
        if status.state == "serving" or not unfinished:
            return f"{name}  {status.state}"
        return f"{name}  {self._bar(name, unfinished[0])}"

    def _bar(self, process: str, phase: Phase) -> str:
        name = f"{phase.name.replace('_', ' '):<10}: "
        # Seconds are also counted here, because a busy engine may report the seconds of an unfinished phase late.
        elapsed = time.monotonic() - self._began.setdefault(process + phase.name, time.monotonic())
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
