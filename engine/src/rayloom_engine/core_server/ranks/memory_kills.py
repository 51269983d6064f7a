"""MemoryKills: the kernel's OOM kills, as restarted ranks report them.

A killed rank cannot report anything. But when a rank is started again on the same host, it reads the kernel's count of
kills.
"""

from __future__ import annotations

from rayloom_engine.common.restarts import WINDOW_SECONDS


class MemoryKills:
    """Counts the kills on each host since the host's first rank attached. Earlier kills have other causes."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # host -> (count when its first rank attached, newest count)
        self._last: tuple[float, str] | None = None  # (time of the last report with new kills, sentence about them)

    def note(self, host: str, number: int, now: float) -> None:
        """Records that a rank attached at `now` (time.monotonic) and reported `number` kills so far on its host."""
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
        """Returns a sentence to append to a loss's message. Empty if no kills are recent enough to be the cause."""
        return self._last[1] if self._last is not None and now - self._last[0] <= WINDOW_SECONDS else ""
