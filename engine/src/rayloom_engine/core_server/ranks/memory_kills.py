"""MemoryKills: what the kernel has killed for want of memory, as the ranks that come back tell it."""

from __future__ import annotations

from rayloom_engine.common.restarts import WINDOW_SECONDS


class MemoryKills:
    """Counts by host, from when its first rank came: what was killed before is no fault of this engine."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # host -> (when its first rank came, newest)
        self._last: tuple[float, str] | None = None  # when kills were last told of, and the sentence

    def note(self, host: str, number: int, now: float) -> None:
        """A rank that has come at `now` (time.monotonic) says that its host has had `number` kills."""
        first, newest = self._counts.get(host, (number, number))
        first = min(first, number)  # a container that is started again counts from 0
        self._counts[host] = first, number
        if number > newest:
            sentence = (
                f"The kernel has killed processes on {host} for want of memory ({number - first} so far): raise its "
                "memory limit, which is spec.engine.resources.limits.memory of an LLMService"
            )
            self._last = now, f". {sentence}"

    def told(self, now: float) -> str:
        """Words that follow on what a loss is told with; empty when the last kills are too old to be its cause."""
        return self._last[1] if self._last is not None and now - self._last[0] <= WINDOW_SECONDS else ""
