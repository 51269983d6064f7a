"""The progress of an engine's start as text for the status: `41 of 131 GB`. Pure.

Each change of the text costs a write of the status. So the text of an engine changes less often the more engines there
are, and the rate of all writes has a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.engines.status import Phase

_INTERVAL_S = 10.0  # between two changes of one engine's text
_MAX_WRITES_PER_S = 20  # by all engines together
_UNITS = ((1e9, "GB"), (1e6, "MB"))
# The phase whose total grows: a file of the hub is added to the total when its download begins.
_GROWING = "resolve"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The text that was last computed for a starting engine."""

    phase: str  # its name in /status; empty if no phase is under way
    amount: str  # empty where the phase counts no bytes
    at: float  # time of the last change, in seconds of the event loop's clock


NO_PROGRESS = StartProgress("", "", float("-inf"))


def interval_s(num_engines: int) -> float:
    """Seconds between two changes of one engine's text within a phase: 10 s, or 50 s with 1,000 engines."""
    return max(_INTERVAL_S, num_engines / _MAX_WRITES_PER_S)


def start_progress(
    before: StartProgress, startup: tuple[Phase, ...], now: float, min_interval_s: float
) -> StartProgress:
    """The progress at `now`. It changes at once with the phase, else `min_interval_s` or more after the last change."""
    current = next((phase for phase in startup if not phase.finished), None)
    if current is None:
        return before if before.phase == "" else NO_PROGRESS
    amount = amount_in_words(current)
    if current.name == before.phase and (amount == before.amount or now - before.at < min_interval_s):
        return before
    return StartProgress(current.name, amount, now)


def amount_in_words(phase: Phase) -> str:
    """`41 of 131 GB`, `0.4 of 1.2 GB` or `12 of 270 MB`; `41 GB` if the total is unknown; empty if not in bytes."""
    if phase.unit not in ("B", "byte", "bytes") or max(phase.done, phase.total) <= 0:
        return ""
    largest = max(phase.done, phase.total)
    scale, unit = next((each for each in _UNITS if largest >= each[0]), _UNITS[-1])
    digits = 1 if unit == "GB" and largest < 10 * scale else 0
    done = f"{phase.done / scale:.{digits}f}"
    if phase.name == _GROWING or phase.total <= 0:
        return f"{done} {unit}"
    return f"{done} of {phase.total / scale:.{digits}f} {unit}"
