"""The decisions of leader election on a Lease. Pure: the caller passes the time.

As in client-go, clocks of two machines are never compared. A candidate takes the Lease once it has seen the same record
for as long as the record says. A leader counts from before it sent its last renewal, and stops writing after three
quarters of that time: the last quarter is for requests under way and for clocks that run up to a third faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayloom_operator.errors import OperatorError

_WRITING_PART = 0.75


class LeaseLost(OperatorError):
    """Another process leads, or led in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The spec of the Lease."""

    holder: str  # empty once it was released
    seconds: float  # that a candidate waits
    transitions: int
    acquired: str
    version: str  # resourceVersion; each renewal makes another one


class Election:
    """The state of one process in the election. A process that led once and finds another leader has to end."""

    def __init__(self, identity: str, seconds: float) -> None:
        self._identity = identity
        self._seconds = seconds
        self._record: LeaseRecord | None = None
        self._seen_at = -math.inf
        self._deadline = -math.inf
        self._has_led = False

    def may_write(self, now: float) -> bool:
        """Returns whether this process leads at `now`."""
        return now < self._deadline

    def saw(self, record: LeaseRecord | None, now: float) -> None:
        """Takes the record that was read, None where there is no Lease. Raises LeaseLost."""
        if self._has_led and (record is None or record.holder != self._identity):
            self.stop()
            holder = record.holder if record is not None else ""
            raise LeaseLost(
                f"the lease went to {holder or 'nobody'}, so this process ends and changes nothing any more"
            )
        if record != self._record:
            self._record = record
            self._seen_at = now

    def wait_seconds(self, now: float) -> float:
        """Returns the seconds until this process may write the Lease; 0 when it may now."""
        record = self._record
        if record is None or record.holder in ("", self._identity):
            return 0.0
        return max(0.0, self._seen_at + record.seconds - now)

    def won(self, record: LeaseRecord, sent_at: float) -> None:
        """Takes our `record`, which the API server stored; its request was sent after `sent_at`."""
        self._record = record
        self._has_led = True
        self._deadline = sent_at + _WRITING_PART * self._seconds

    def stop(self) -> None:
        """Lets this process write nothing from here on, so that the Lease can be released."""
        self._deadline = -math.inf

    def claim(self, time: str) -> LeaseRecord:
        """Returns the record to write once `wait_seconds` is 0; `time` is the time of day in RFC 3339."""
        old = self._record
        is_ours = old is not None and old.holder == self._identity
        return LeaseRecord(
            holder=self._identity,
            seconds=self._seconds,
            transitions=0 if old is None else old.transitions + (not is_ours),
            acquired=old.acquired if old is not None and is_ours else time,
            version="" if old is None else old.version,
        )
