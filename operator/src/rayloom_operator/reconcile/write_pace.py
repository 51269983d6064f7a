"""Limits how often the status of a service is written. Pure: the caller passes the time.

An engine's answers become part of the status, and users choose the engine's image. Without a limit, an engine that
answers each poll differently would cause a write to the API server for each poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator.names import ServiceKey

# The shortest time in seconds between two writes that only change messages, the nodes of ranks or the loaded bytes.
WORDS_INTERVAL_S = 5.0
# Every write takes 1 from a budget of 60, which grows by 2 a second. A rollout of 64 engine replicas does not exhaust
# the budget. If the budget is empty, a write waits for up to half a second.
_BURST = 60.0
_WRITES_PER_S = 2.0


@dataclass(slots=True)
class _Pace:
    words_at: float = float("-inf")  # time of the last write that left `without_words` of the status unchanged
    left: float = _BURST  # writes left in the budget
    at: float = field(default=0.0)  # time at which `left` was computed


class WritePace:
    """Decides when the status of a service may be written. Times are seconds of any clock that only advances."""

    def __init__(self) -> None:
        self._paces: dict[ServiceKey, _Pace] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._paces.pop(key, None)

    def wait_s(self, key: ServiceKey, before: Mapping[str, Any], content: Mapping[str, Any], now: float) -> float:
        """Returns the seconds until `content` may replace the status `before`.

        If the result is 0, the caller has to write: the write is counted already.
        """
        pace = self._paces.setdefault(key, _Pace(at=now))
        pace.left = min(_BURST, pace.left + (now - pace.at) * _WRITES_PER_S)
        pace.at = now
        is_words_alone = without_words(before) == without_words(content)
        if is_words_alone:
            wait_s = pace.words_at + WORDS_INTERVAL_S - now
            if wait_s > 0:
                return wait_s
        if pace.left < 1:
            return (1 - pace.left) / _WRITES_PER_S
        pace.left -= 1
        if is_words_alone:
            pace.words_at = now
        return 0.0


def without_words(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a status on which programs act: without messages, nodes and loaded bytes."""
    kept = _without(status, "loading")
    kept["conditions"] = [_without(each, "message") for each in status.get("conditions", ())]
    kept["groups"] = [
        _without(each, "nodes", "failure") | {"failure": _without(each.get("failure") or {}, "message")}
        for each in status.get("groups", ())
    ]
    return kept


def _without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}
