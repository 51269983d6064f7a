"""GatewayAdapters: the LoRA adapters that requests to a gateway can name: reported by its engines, or declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.http.errors import ApiError

_NOT_REPORTED = "may be a LoRA adapter of engines that have not reported theirs to this gateway yet"
_NOT_LOADED = (
    "is the name of a LoRA adapter that no engine has loaded (status.adapters of the LLMService has its state)"
)


class GatewayAdapters:
    """The adapters by name, from the engines' latest statuses. For one event loop.

    While no engine is left, those of the last engines stay: a request for one of them waits for the next engine. A
    declared name is known before any engine has reported it.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ServedAdapter] | None = None  # None: no engine has reported its adapters yet
        self._declared: frozenset[str] | None = None  # None: engines may have adapters of any name
        self._has_report = False  # a connected engine has reported its adapters

    @property
    def entries(self) -> list[ServedAdapter]:
        return list((self._entries or {}).values())

    @property
    def awaited(self) -> list[str]:
        """The declared names, sorted, about which only the next engine can say more."""
        return [] if self._has_report else sorted(name for name in self._declared or () if self.get(name) is None)

    def declare(self, names: Iterable[str] | None) -> None:
        """Sets the names of the adapters that the engines are to have; None: they are not known."""
        self._declared = None if names is None else frozenset(names)

    def get(self, name: str) -> ServedAdapter | None:
        return (self._entries or {}).get(name)

    def has(self, name: str) -> bool:
        """Returns whether an engine has reported the adapter `name`, or it is declared."""
        return self.get(name) is not None or name in (self._declared or ())

    def is_awaited(self, name: str) -> bool:
        """Returns whether `name` is one of `awaited`."""
        return not self._has_report and self.get(name) is None and name in (self._declared or ())

    def check_known(self, name: str) -> None:
        """Raises ApiError 503 if an adapter `name`, which no engine has reported, may exist."""
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
        """Reads the adapters of the engines. Returns whether their first report has come since one was missing.

        `links`: those of the gateway's model.
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


def merged(reported: list[tuple[ServedAdapter, ...]]) -> dict[str, ServedAdapter]:
    """Returns name -> adapter. `reported`: the adapters of each engine.

    While engines replace the files of a name one after the other, most of them decide; of as many, the newest.
    """
    entries = [entry for engine in reported for entry in engine]
    num_engines = Counter((entry.name, entry.adapter.digest) for entry in entries)
    found: dict[str, ServedAdapter] = {}
    for entry in sorted(entries, key=lambda each: (num_engines[each.name, each.adapter.digest], each.created)):
        found[entry.name] = entry
    return {name: found[name] for name in dict.fromkeys(entry.name for entry in entries)}
