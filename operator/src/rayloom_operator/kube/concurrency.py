"""The number of reconciles that run at once, adapted to how long the API server takes for a request.

A crowded (overloaded) API server gets no more done with more reconciles: they only slow down every request, also those
of other clients. As in TCP Vegas (Brakmo and Peterson, 1995), the time of a request is compared with the shortest time
of its kind. So an API server that is always slow, because it is far away or has slow webhooks, does not count as
crowded. The method has two limits: an API server that becomes slow for good counts as crowded for about 20,000
requests, and after as many requests one that is always crowded counts as slow but not crowded.
"""

from __future__ import annotations

from statistics import median

# With a single reconcile, one request that hangs would hold up every service.
_FEWEST = 2
_FIRST = 4
_MOST = 8
# The number of requests that are judged together.
_NUM_CALLS = 32
# Multiples of the shortest time of a request of the same kind. Below `_ROOMY` there is room for one more reconcile;
# above `_CROWDED` the API server is crowded.
_ROOMY = 2.0
_CROWDED = 3.5
# A request that takes less than this has not waited for other requests.
_NO_WAIT_S = 0.004
# Each longer request raises the stored shortest time by this share of the difference, because the API server may have
# moved and become slower.
_FORGOTTEN = 0.00003


class ConcurrencyLimit:
    """Adapts `value`, the number of reconciles at once, to the times of requests. With `fixed` it never changes."""

    def __init__(self, fixed: int | None = None) -> None:
        self.value = fixed or _FIRST
        self._is_fixed = fixed is not None
        self._shortest: dict[str, float] = {}  # seconds, by kind of request
        self._stretches: list[float] = []

    def took(self, kind: str, seconds: float) -> None:
        """Notes the time of a request. Requests are compared within their kind, because some kinds take longer."""
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
        """Lowers `value`. Called for an answer 429, with which the API server itself says that it is crowded."""
        self._set(max(self.value - max(self.value // 4, 1), _FEWEST))
        self._stretches.clear()

    def _set(self, value: int) -> None:
        if not self._is_fixed:
            self.value = value
