"""The state of a container that crashes repeatedly, with a kubelet's back-off in seconds instead of minutes. Pure.

A real kubelet restarts the container at once, then after 10 s, 20 s, 40 s and so on up to 5 minutes.
"""

from __future__ import annotations

from typing import NamedTuple

_RUNS_S = 0.2
_FIRST_BACK_OFF_S = 0.4
_LONGEST_BACK_OFF_S = 6.0


class Crash(NamedTuple):
    """The state of a crashing container."""

    num_restarts: int
    is_running: bool
    changes_in_s: float


def crash(elapsed_s: float) -> Crash:
    """The container's state this many seconds after its first start."""
    number, back_off_s = 0, 0.0
    while True:
        if elapsed_s < _RUNS_S:
            return Crash(number, True, _RUNS_S - elapsed_s)
        elapsed_s -= _RUNS_S
        if elapsed_s < back_off_s:
            return Crash(number, False, back_off_s - elapsed_s)
        elapsed_s -= back_off_s
        number += 1
        back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S) if number > 1 else _FIRST_BACK_OFF_S
