"""Trials: drafts that are made although their measured cost forbids them.

A cost is measured only in steps with drafts. The first measured cost may be too high, for example because another
program slowed the step down. Without trials, the cost would then never be measured again, and no sequence would get
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

# Number of steps between the first trials. A trial costs at most a few tokens' time, or a pass of the draft model, so
# all trials together cost little.
_FIRST_PAUSE = 64
# A cost is a median of nine measurements, so this many right measurements replace the wrong ones. If the cost is still
# too high after these trials, it was measured right, and each further pause is twice as long.
_NUM_HEALING = 5
_MOST_PAUSE = 1024
# Number of steps after a trial in which no sequence had a draft. A search for drafts costs time, too.
_PAUSE_AFTER_MISS = 8

_Item = TypeVar("_Item")


class Trials:
    """Counts the steps in which drafts cost too much, and decides in which of these steps a draft is tried."""

    def __init__(self) -> None:
        self._num_steps = 0  # steps since the last draft or trial
        self._pause = _FIRST_PAUSE  # steps before the next trial
        self._pause_after_draft = _FIRST_PAUSE
        self._num_made = 0  # trials with a draft since drafts were worth their cost
        self._num_tried = 0  # sequences of all trials

    def is_due(self) -> bool:
        """Returns whether this step has a trial. Called once for each step in which drafts cost too much."""
        self._num_steps += 1
        return self._num_steps >= self._pause

    def in_turn(self, items: Sequence[_Item], num: int) -> list[_Item]:
        """Returns the `num` items that are tried next, or all items if they are fewer. The items take turns."""
        first = self._num_tried
        self._num_tried += num
        return [items[(first + more) % len(items)] for more in range(min(num, len(items)))]

    def tried(self, *, has_draft: bool) -> None:
        """Records a trial. `has_draft`: True if one of the tried sequences has got a draft."""
        self._num_steps = 0
        if not has_draft:
            self._pause = _PAUSE_AFTER_MISS
            return
        self._num_made += 1
        if self._num_made >= _NUM_HEALING:
            self._pause_after_draft = min(_MOST_PAUSE, 2 * self._pause_after_draft)
        self._pause = self._pause_after_draft

    def paid(self) -> None:
        """Records that a draft is made because drafts are worth their cost."""
        self._num_steps = 0
        self._num_made = 0
        self._pause = self._pause_after_draft = _FIRST_PAUSE
