"""MemoryKills: processes that the kernel has killed for want of memory, as restarted ranks report them.

A rank that is killed says nothing; only the next start of it, on the same host, can read the kernel's count.
"""

from __future__ import annotations

from rayloom_engine.common.restarts import WINDOW_SECONDS


class MemoryKills:
    """Counts by host from when its first rank came: earlier kills are no fault of this engine."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # host -> (count when its first rank came, newest count)
        self._last: tuple[float, str] | None = None  # time of the last report with new kills, and the sentence

    def note(self, host: str, number: int, now: float) -> None:
        """A rank that attached at `now` (time.monotonic) reports that its host has had `number` kills."""
        first, newest = self._counts.get(host, (number, number))
        first = min(first, number)  # a restarted container counts from 0
        self._counts[host] = first, number
        if number > newest:
            sentence = (
                f"The kernel has killed processes on {host} for want of memory ({number - first} so far): raise its "
                "memory limit, which is spec.engine.resources.limits.memory of an LLMService"
            )
            self._last = now, f". {sentence}"

    def sentence(self, now: float) -> str:
        """A sentence to append to the message of a loss; empty when the last kills are too old to be its cause."""
        return self._last[1] if self._last is not None and now - self._last[0] <= WINDOW_SECONDS else ""
