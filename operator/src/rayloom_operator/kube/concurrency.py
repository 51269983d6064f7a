"""How many passes run at once: as many as the API server takes without letting each wait for the others.

More of them get no more done: each call takes longer, and so does everybody else's. A crowd is told as TCP Vegas tells
it (Brakmo and Peterson, 1995): by what calls take beside the shortest of their kind. So an API server that is slow by
nature, far away or behind slow webhooks, is not taken for a crowded one. What it cannot tell: a server that becomes
slow for good is taken for a crowded one for some 20,000 calls, and one without a break for a slow one after as many.
"""

from __future__ import annotations

from statistics import median

# At least so many, or one call that hangs would hold every service.
_FEWEST, _FIRST, _MOST = 2, 4, 8
# The last calls that are judged together.
_NUM_CALLS = 32
# Times the shortest call of its kind. Below the first there is room for one more pass; above the second it is crowded.
_ROOMY, _CROWDED = 2.0, 3.5
# Shorter calls than this wait for nobody.
_NO_WAIT_S = 0.004
# What was once the shortest is forgotten by this share of the difference with each call: the server may have moved.
_FORGOTTEN = 0.00003


class ConcurrencyLimit:
    """Is told of calls and knows no clock."""

    def __init__(self) -> None:
        self.value = _FIRST
        self._shortest: dict[str, float] = {}  # seconds, by kind of call
        self._stretches: list[float] = []

    def told(self, kind: str, seconds: float) -> None:
        """A call of this kind took so long. Kinds are told apart because some take longer by nature."""
        shortest = self._shortest.get(kind, seconds)
        self._shortest[kind] = min(seconds, shortest + _FORGOTTEN * (seconds - shortest))
        self._stretches.append(seconds / max(self._shortest[kind], _NO_WAIT_S))
        if len(self._stretches) < _NUM_CALLS:
            return
        stretch = median(self._stretches)
        if stretch > _CROWDED:
            self.refused()
        elif stretch < _ROOMY:
            self.value = min(self.value + 1, _MOST)
        self._stretches.clear()

    def refused(self) -> None:
        """The API server says itself that it has too much to do (429)."""
        self.value = max(self.value - max(self.value // 4, 1), _FEWEST)
        self._stretches.clear()
