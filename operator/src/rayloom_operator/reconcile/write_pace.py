"""Limits how often the status of a service is written. Pure; the caller has the clock.

Answers of an engine become part of the status, and the engine's image may be anybody's. Without a limit, an engine
whose every answer differs would cost the API server and the operator a write each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator.names import ServiceKey

# Seconds between two writes that change text alone: a sentence, the nodes of ranks, bytes that were loaded.
WORDS_INTERVAL_S = 5.0
# All other writes draw on a budget, which a rollout of 64 engine replicas does not exhaust. Beyond it a write waits for
# half a second.
_BURST = 60.0
_WRITES_PER_S = 2.0


@dataclass(slots=True)
class _Pace:
    words_at: float = float("-inf")  # time of the last write that changed text alone
    left: float = _BURST  # writes that may be made at once
    at: float = field(default=0.0)  # time for which `left` holds


class WritePace:
    """Times are seconds of any clock that only advances."""

    def __init__(self) -> None:
        self._paces: dict[ServiceKey, _Pace] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._paces.pop(key, None)

    def wait_s(self, key: ServiceKey, before: Mapping[str, Any], content: Mapping[str, Any], now: float) -> float:
        """Returns after how many seconds `content` may be written in place of `before`; at 0 it counts as written."""
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
    """Returns the part of a status by which programs decide: without sentences, nodes, and bytes that were loaded."""
    kept = _without(status, "loading")
    kept["conditions"] = [_without(each, "message") for each in status.get("conditions", ())]
    kept["groups"] = [
        _without(each, "nodes", "failure") | {"failure": _without(each.get("failure") or {}, "message")}
        for each in status.get("groups", ())
    ]
    return kept


def _without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}
