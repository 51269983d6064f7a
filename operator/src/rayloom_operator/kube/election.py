"""The decisions of leader election on a Lease. Pure: the caller passes the time.

As in client-go, the clocks of two machines are never compared. A candidate takes the Lease once it has seen the same
record unchanged for the record's `seconds`. A leader stops writing once three quarters of `seconds` have passed since
it sent its last renewal. During the last quarter, requests that are under way can end. The last quarter also allows for
candidates whose clocks run up to a third faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayloom_operator.errors import OperatorError

_WRITING_PART = 0.75


class LeaseLost(OperatorError):
    """Another process leads now, or has led since this process last led."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The spec of the Lease."""

    holder: str  # empty if the Lease was released
    seconds: float  # how long a candidate must see this record unchanged before it takes the Lease
    transitions: int
    acquired: str
    version: str  # resourceVersion; changes with each renewal


class Election:
    """The state of one process in the election. A process that has led and finds another leader must exit."""

    def __init__(self, identity: str, seconds: float) -> None:
        self._identity = identity
        self._seconds = seconds
        self._record: LeaseRecord | None = None
        self._seen_at = -math.inf
        self._deadline = -math.inf
        self._has_led = False

    def may_write(self, now: float) -> bool:
        """Returns True if this process leads at the time `now`."""
        return now < self._deadline

    def saw(self, record: LeaseRecord | None, now: float) -> None:
        """Notes the record that was just read; None if there is no Lease.

        Raises LeaseLost if this process has led, and does not hold the Lease any more.
        """
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
        """Returns the seconds until this process may write the Lease; 0 if it may write now."""
        record = self._record
        if record is None or record.holder in ("", self._identity):
            return 0.0
        return max(0.0, self._seen_at + record.seconds - now)

    def won(self, record: LeaseRecord, sent_at: float) -> None:
        """Notes that the API server has stored our `record`. The request was sent at `sent_at` or later."""
        self._record = record
        self._has_led = True
        self._deadline = sent_at + _WRITING_PART * self._seconds

    def stop(self) -> None:
        """Makes `may_write` return False from now on. After that the Lease can be released."""
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
