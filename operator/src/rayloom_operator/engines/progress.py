"""The progress of an engine's start, as text for the status: `41 of 131 GB`. Pure.

Each change of the text causes a write of the status. To limit the rate of all writes, the text of an engine changes
less often if there are more engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.engines.status import Phase

_INTERVAL_S = 10.0  # minimum time between two changes of one engine's text
_MAX_WRITES_PER_S = 20  # status writes of all engines together
_UNITS = ((1e9, "GB"), (1e6, "MB"))
# The total of this phase is not shown, because the total grows: each file of the hub is added when its download begins.
_GROWING = "resolve"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The last computed progress of a starting engine."""

    phase: str  # name of the phase in /status; empty if no phase is unfinished
    amount: str  # the text; empty if the phase counts no bytes
    at: float  # time of the last change, in seconds of the event loop's clock


NO_PROGRESS = StartProgress("", "", float("-inf"))


def interval_s(num_engines: int) -> float:
    """Returns the minimum seconds between two changes of an engine's text in a phase: 10, or 50 with 1,000 engines."""
    return max(_INTERVAL_S, num_engines / _MAX_WRITES_PER_S)


def start_progress(
    before: StartProgress, startup: tuple[Phase, ...], now: float, min_interval_s: float
) -> StartProgress:
    """Returns the progress at `now`, or `before` if the text need not change yet.

    If the phase is the same, `before` is returned in two cases: the amount is the same, or `before` is younger than
    `min_interval_s`.
    """
    current = next((phase for phase in startup if not phase.finished), None)
    if current is None:
        return before if before.phase == "" else NO_PROGRESS
    amount = amount_in_words(current)
    if current.name == before.phase and (amount == before.amount or now - before.at < min_interval_s):
        return before
    return StartProgress(current.name, amount, now)


def amount_in_words(phase: Phase) -> str:
    """Returns `41 of 131 GB`, or `41 GB` if the total is unknown; empty if the phase does not count bytes."""
    if phase.unit not in ("B", "byte", "bytes") or max(phase.done, phase.total) <= 0:
        return ""
    largest = max(phase.done, phase.total)
    scale, unit = next((each for each in _UNITS if largest >= each[0]), _UNITS[-1])
    digits = 1 if unit == "GB" and largest < 10 * scale else 0
    done = f"{phase.done / scale:.{digits}f}"
    if phase.name == _GROWING or phase.total <= 0:
        return f"{done} {unit}"
    return f"{done} of {phase.total / scale:.{digits}f} {unit}"
