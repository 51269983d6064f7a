"""AnswerBook: decides which answers are kept for repeated requests, and for how long. Pure: the caller passes the time.

An answer is kept while it has readers, and then for some seconds, which start again when its computation ends. It is
released earlier if all kept answers need too much memory, or if answers without a reader have too many sequences or
tokens. An answer without an Idempotency-Key is also released when its last reader has got all of it. A repeat does not
find a released answer. If a released answer has no reader, its computation must end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

A = TypeVar("A")


class KeyReused(Exception):
    """An Idempotency-Key came with another body than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLimits:
    """Bounds of all kept answers together."""

    seconds: float = 30.0  # seconds for which an answer is kept without a reader; its computation's end restarts them
    # While an answer with an X-Request-Id is computed, the smaller of this limit and `seconds` applies. Proxies add
    # this header to every request, so most clients of such answers send no repeat.
    detached_id_seconds: float = 5.0
    max_answers: int = 1024
    max_bytes: int = 64 * 1024 * 1024
    max_detached_choices: int = 16  # the most sequences that are computed although nobody reads their answer
    max_detached_tokens: int = 65536  # the most tokens of prompts and answers of these sequences


@dataclass(slots=True, kw_only=True, eq=False)
class Entry(Generic[A]):
    """A kept answer with the figures from which the book decides when to release it."""

    key: Hashable
    digest: bytes  # hash of the request's body
    tenant: str
    is_strict: bool  # the key is an Idempotency-Key
    answer: A
    num_readers: int = 0
    is_running: bool = True
    is_kept: bool = True
    num_bytes: int = 0
    num_choices: int = 1
    num_tokens: int = 0  # tokens of the prompts and of the choices so far
    idle_since_s: float | None = None  # set while the answer has no reader

    @property
    def is_detached(self) -> bool:
        """True if the answer is computed though nobody reads it."""
        return self.is_running and self.num_readers == 0


class AnswerBook(Generic[A]):
    """The kept answers by key, in order of arrival. Methods return the entries that they released, each once."""

    def __init__(self, limits: KeepLimits) -> None:
        self.limits = limits
        self.num_bytes = 0
        self._entries: dict[Hashable, Entry[A]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_idle(self) -> bool:
        """True if an entry has no reader. Time alone can release such an entry."""
        return any(entry.num_readers == 0 for entry in self._entries.values())

    @property
    def num_detached(self) -> int:
        """The number of answers that are computed though nobody reads them."""
        return sum(entry.is_detached for entry in self._entries.values())

    def detached(self) -> list[Entry[A]]:
        """Returns the entries that are computed though nobody reads them, in the order in which their readers left."""
        found = [entry for entry in self._entries.values() if entry.is_detached]
        return sorted(found, key=lambda entry: entry.idle_since_s or 0.0)

    def find(self, key: Hashable, digest: bytes) -> Entry[A] | None:
        """Returns the entry that a request with this key and body shall read; None if there is no such entry.

        Several requests may share an X-Request-Id. So an answer with only such an id is found only while it has no
        reader: the connection of its last reader is then broken, and this request is probably a repeat. Raises
        KeyReused if an Idempotency-Key came with another body.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.digest != digest:
            raise KeyReused
        return entry if entry.is_strict or entry.num_readers == 0 else None

    def add(self, entry: Entry[A]) -> list[Entry[A]]:
        """Keeps a new entry, which has a reader. An earlier entry with the same key is released."""
        released = self.release([self._entries[entry.key]]) if entry.key in self._entries else []
        entry.num_readers = 1
        self._entries[entry.key] = entry
        return released + self._beyond_limits()

    def join(self, entry: Entry[A]) -> None:
        """Counts a further reader."""
        entry.num_readers += 1
        entry.idle_since_s = None

    def leave(self, entry: Entry[A], now_s: float, *, is_whole: bool) -> list[Entry[A]]:
        """Removes a reader. `is_whole`: the whole answer was sent to this reader."""
        entry.num_readers -= 1
        if entry.num_readers or not entry.is_kept:
            return []
        if is_whole and not entry.is_strict:
            return self.release([entry])
        entry.idle_since_s = now_s
        return self._beyond_limits()

    def grow(self, entry: Entry[A], num_bytes: int) -> list[Entry[A]]:
        """Counts bytes of an entry's answer."""
        if not entry.is_kept:
            return []
        entry.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return self._beyond_limits() if self.num_bytes > self.limits.max_bytes else []

    def end(self, entry: Entry[A], now_s: float, *, is_good: bool) -> list[Entry[A]]:
        """Records the end of the computation. Releases an answer that is not good: a repeat is computed again."""
        entry.is_running = False
        if not is_good and entry.is_kept:
            return self.release([entry])
        if entry.num_readers == 0:
            entry.idle_since_s = now_s
        return []

    def expire(self, now_s: float) -> list[Entry[A]]:
        """Releases entries that had no reader for too long, and entries beyond the limits. Call it regularly."""
        due = [
            entry
            for entry in self._entries.values()
            if entry.idle_since_s is not None and now_s - entry.idle_since_s >= self._kept_s(entry)
        ]
        return self.release(due) + self._beyond_limits()

    def release(self, entries: list[Entry[A]]) -> list[Entry[A]]:
        """Releases these entries. Returns them."""
        for entry in entries:
            del self._entries[entry.key]
            entry.is_kept = False
            self.num_bytes -= entry.num_bytes
        return entries

    def _kept_s(self, entry: Entry[A]) -> float:
        """Returns the seconds for which an entry is kept without a reader."""
        if entry.is_running and not entry.is_strict:
            return min(self.limits.seconds, self.limits.detached_id_seconds)
        return self.limits.seconds

    def _beyond_limits(self) -> list[Entry[A]]:
        released: list[Entry[A]] = []
        while self.num_bytes > self.limits.max_bytes or len(self._entries) > self.limits.max_answers:
            released += self.release([min(self._entries.values(), key=_worth)])
        detached = self.detached()
        while self._takes_too_much(detached):
            # The API key with the most choices that nobody reads loses the answer whose last reader left first. So many
            # broken connections of one key release no answers of other keys.
            num_choices: Counter[str] = Counter()
            for entry in detached:
                num_choices[entry.tenant] += entry.num_choices
            (tenant, _), *_ = num_choices.most_common(1)
            victim = next(entry for entry in detached if entry.tenant == tenant)
            detached.remove(victim)
            released += self.release([victim])
        return released

    def _takes_too_much(self, detached: list[Entry[A]]) -> bool:
        return (
            sum(entry.num_choices for entry in detached) > self.limits.max_detached_choices
            or sum(entry.num_tokens for entry in detached) > self.limits.max_detached_tokens
        )


def _worth(entry: Entry[A]) -> tuple[bool, bool, float]:
    """Sort key: entries without a reader are released first. Among these: complete entries, then the longest idle."""
    return entry.num_readers > 0, entry.is_running, entry.idle_since_s or 0.0
