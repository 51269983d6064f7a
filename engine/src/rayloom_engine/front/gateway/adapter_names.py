"""GatewayAdapters: the LoRA adapters that requests to a gateway can name: reported by its engines, or declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.http.errors import ApiError

_NOT_REPORTED = "may be a LoRA adapter of engines that have not reported theirs to this gateway yet"
_NOT_LOADED = (
    "is the name of a LoRA adapter that no engine has loaded (status.adapters of the LLMService has its state)"
)

AdapterState = Literal["unknown", "declared", "reported"]


class GatewayAdapters:
    """The adapters by name, from the engines' latest statuses. For one event loop.

    While no engine is connected, the adapters of the last engines stay: a request for such an adapter waits for the
    next engine. A declared name is known before any engine has reported it. A name that is no longer declared becomes
    unknown once no engine has the adapter.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ServedAdapter] | None = None  # None: no engine has reported its adapters yet
        self._declared: frozenset[str] | None = None  # None: engines may have adapters of any name
        self._withdrawn: frozenset[str] = frozenset()  # names that were declared earlier and are not declared any more
        self._has_report = False  # a connected engine has reported its adapters

    def continue_from(self, before: GatewayAdapters) -> None:
        """Copies the adapters of the same engines from `before`. The engines have not reported to this object yet."""
        self._entries = before._entries
        self._declared = before._declared
        self._withdrawn = before._withdrawn

    @property
    def entries(self) -> list[ServedAdapter]:
        return list(self._known().values())

    @property
    def awaited(self) -> list[str]:
        """The sorted declared names that no engine has reported; empty once a connected engine reports adapters."""
        return [] if self._has_report else sorted(name for name in self._declared or () if self.get(name) is None)

    def declare(self, names: Iterable[str] | None) -> None:
        """Sets the names of the adapters that the engines are to have; None: the names are not known."""
        declared = None if names is None else frozenset(names)
        self._withdrawn = (self._withdrawn | (self._declared or frozenset())) - (declared or frozenset())
        self._declared = declared

    def get(self, name: str) -> ServedAdapter | None:
        return self._known().get(name)

    def state(self, name: str) -> AdapterState:
        """Returns the state of the adapter `name`. An adapter that is declared and reported is "reported"."""
        if self.get(name) is not None:
            return "reported"
        return "declared" if name in (self._declared or ()) else "unknown"

    def is_awaited(self, name: str) -> bool:
        """Returns whether `name` is one of `awaited`."""
        return name in self.awaited

    def check_known(self, name: str) -> None:
        """Raises ApiError 503 if an adapter `name` may exist although no engine has reported it."""
        if self._declared is None:
            problem = "" if self._entries is not None else f"is no served model, and {_NOT_REPORTED}"
        else:
            problem = _NOT_LOADED if name in self._declared else ""
        if problem:
            raise ApiError(
                503,
                f"model: {shown(name)} {problem}; try again in a second, or name a served model",
                type="service_unavailable_error",
                param="model",
                code="engine_unavailable",
                headers={"Retry-After": "1"},
            )

    def update(self, links: list[EngineLink]) -> bool:
        """Reads the adapters of the engines. Returns True if an engine reports them now, but none did at the last call.

        `links`: the links to the engines of the gateway's model.
        """
        reported = [
            link.status.adapters
            for link in links
            if link.is_connected and link.status is not None and link.status.adapters is not None
        ]
        had_report = self._has_report
        self._has_report = bool(reported)
        if reported:
            self._entries = merged(reported)
        return self._has_report and not had_report

    def _known(self) -> dict[str, ServedAdapter]:
        entries = self._entries or {}
        if self._has_report or not self._withdrawn:
            return entries
        return {name: entry for name, entry in entries.items() if name not in self._withdrawn}


def merged(reported: list[tuple[ServedAdapter, ...]]) -> dict[str, ServedAdapter]:
    """Returns name -> adapter. `reported`: the adapters of each engine.

    Engines may replace the files of a name one after the other. In the meantime, the version that most engines have is
    returned. If equally many engines have several versions, the newest of these versions is returned.
    """
    entries = [entry for engine in reported for entry in engine]
    num_engines = Counter((entry.name, entry.adapter.digest) for entry in entries)
    found: dict[str, ServedAdapter] = {}
    for entry in sorted(entries, key=lambda each: (num_engines[each.name, each.adapter.digest], each.created)):
        found[entry.name] = entry
    return {name: found[name] for name in dict.fromkeys(entry.name for entry in entries)}
