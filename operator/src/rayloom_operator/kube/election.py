"""Who of several operators works: the decisions of leader election on a Lease. Pure; the caller brings the clock.

As in client-go, no two machines' clocks are compared. A candidate takes the lease when it has seen the same record
for as long as the record says. A leader counts from before it sent its last renewal, and stops writing after three
quarters of that time: the rest is for requests under way and for clocks that run up to a third faster than others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayloom_operator.errors import OperatorError

_WRITING_PART = 0.75


class LeaseLost(OperatorError):
    """Another process leads, or led meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the Lease says."""

    holder: str  # empty once it was released
    seconds: float  # for which a candidate waits
    transitions: int
    acquired: str
    version: str  # resourceVersion; each renewal makes another one


class Election:
    """One process' part. It has led for ever once it has led: when another one did after it, it is to end."""

    def __init__(self, identity: str, seconds: float) -> None:
        self._identity = identity
        self._seconds = seconds
        self._record: Record | None = None
        self._seen_at = -math.inf
        self._deadline = -math.inf
        self._has_led = False

    def may_write(self, now: float) -> bool:
        return now < self._deadline

    def saw(self, record: Record | None, now: float) -> None:
        """Takes what the Lease says, None when there is none. Raises LeaseLost."""
        if self._has_led and (record is None or record.holder != self._identity):
            self.stop()
            holder = record.holder if record is not None else ""
            raise LeaseLost(
                f"the lease went to {holder or 'nobody'}, so this process ends and changes nothing any more"
            )
        if record != self._record:
            self._record, self._seen_at = record, now

    def wait_seconds(self, now: float) -> float:
        """Until the lease may be written; 0 when that is now."""
        record = self._record
        if record is None or record.holder in ("", self._identity):
            return 0.0
        return max(0.0, self._seen_at + record.seconds - now)

    def won(self, record: Record, sent_at: float) -> None:
        """The API server took our `record`, whose request was sent after `sent_at`."""
        self._record, self._has_led = record, True
        self._deadline = sent_at + _WRITING_PART * self._seconds

    def stop(self) -> None:
        """Writes nothing from here on, so that the lease can be released."""
        self._deadline = -math.inf

    def claim(self, clock: str) -> Record:
        """The record to write when `wait_seconds` is 0; `clock` is the time of day."""
        old = self._record
        is_ours = old is not None and old.holder == self._identity
        return Record(
            holder=self._identity,
            seconds=self._seconds,
            transitions=0 if old is None else old.transitions + (not is_ours),
            acquired=old.acquired if old is not None and is_ours else clock,
            version="" if old is None else old.version,
        )
