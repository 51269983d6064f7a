"""The number of reconciles that run at once, adapted to how long the API server takes for a request.

A crowded API server gets no more done with more reconciles: each request takes longer, also those of other clients. As
in TCP Vegas (Brakmo and Peterson, 1995), a request's time is compared with the shortest of its kind. So an API server
that is slow by nature, far away or behind slow webhooks, does not count as crowded. The method has two limits: a server
that becomes slow for good counts as crowded for about 20,000 requests, and one that is always crowded counts as slow by
nature after as many.
"""

from __future__ import annotations

from statistics import median

# With one reconcile, a request that hangs would hold every service.
_FEWEST = 2
_FIRST = 4
_MOST = 8
# Requests that are judged together.
_NUM_CALLS = 32
# Times the shortest request of the kind. Below the first there is room for one more reconcile; above the second the API
# server is crowded.
_ROOMY = 2.0
_CROWDED = 3.5
# Requests shorter than this have waited for no other.
_NO_WAIT_S = 0.004
# Each request moves the shortest time by this share of the difference, because the API server may have moved.
_FORGOTTEN = 0.00003


class ConcurrencyLimit:
    """Adapts `value` to the requests that it is given; reads no clock. With `fixed` the value never changes."""

    def __init__(self, fixed: int | None = None) -> None:
        self.value = fixed or _FIRST
        self._is_fixed = fixed is not None
        self._shortest: dict[str, float] = {}  # seconds, by kind of request
        self._stretches: list[float] = []

    def took(self, kind: str, seconds: float) -> None:
        """Takes the time of a request. Requests are compared within their kind, because some kinds take longer."""
        shortest = self._shortest.get(kind, seconds)
        self._shortest[kind] = min(seconds, shortest + _FORGOTTEN * (seconds - shortest))
        self._stretches.append(seconds / max(self._shortest[kind], _NO_WAIT_S))
        if len(self._stretches) < _NUM_CALLS:
            return
        stretch = median(self._stretches)
        if stretch > _CROWDED:
            self.refused()
        elif stretch < _ROOMY:
            self._set(min(self.value + 1, _MOST))
        self._stretches.clear()

    def refused(self) -> None:
        """Takes an answer 429: the API server itself says that it is crowded."""
        self._set(max(self.value - max(self.value // 4, 1), _FEWEST))
        self._stretches.clear()

    def _set(self, value: int) -> None:
        if not self._is_fixed:
            self.value = value
