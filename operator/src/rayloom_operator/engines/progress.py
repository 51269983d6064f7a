"""How far an engine's start is, in words for the status: `41 of 131 GB`. Pure.

Each change of the words is a write of the status, so they change only so often, however many engines start at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.engines.status import Phase

_INTERVAL_S = 10.0
# Writes of all engines together, where many start at once.
_MAX_WRITES_PER_S = 20
_UNITS = ((1e9, "GB"), (1e6, "MB"))
# The hub's total grows while it downloads: a file counts from its beginning on.
_GROWING = "resolve"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """What was said last of an engine that starts; `at` counts like the readings' seconds."""

    phase: str  # as /status names it; empty while the engine names none
    amount: str  # empty where the phase counts no bytes
    at: float


NO_PROGRESS = StartProgress("", "", float("-inf"))


def interval_s(num_engines: int) -> float:
    """After how many seconds the words of one engine may change within a phase: 10 s, 50 s with 1,000 engines."""
    return max(_INTERVAL_S, num_engines / _MAX_WRITES_PER_S)


def start_progress(before: StartProgress, startup: tuple[Phase, ...], now: float, least_s: float) -> StartProgress:
    """What to say now: at once for another phase, else no sooner than `least_s` after the last change."""
    current = next((phase for phase in startup if not phase.finished), None)
    if current is None:
        return before if before.phase == "" else NO_PROGRESS
    amount = amount_in_words(current)
    if current.name == before.phase and (amount == before.amount or now - before.at < least_s):
        return before
    return StartProgress(current.name, amount, now)


def amount_in_words(phase: Phase) -> str:
    """`41 of 131 GB`, `0.4 of 1.2 GB`, `12 of 270 MB`; `41 GB` while the total is not known. Empty for other units."""
    if phase.unit not in ("B", "byte", "bytes") or max(phase.done, phase.total) <= 0:
        return ""
    largest = max(phase.done, phase.total)
    scale, unit = next((each for each in _UNITS if largest >= each[0]), _UNITS[-1])
    digits = 1 if unit == "GB" and largest < 10 * scale else 0
    done = f"{phase.done / scale:.{digits}f}"
    if phase.name == _GROWING or phase.total <= 0:
        return f"{done} {unit}"
    return f"{done} of {phase.total / scale:.{digits}f} {unit}"
