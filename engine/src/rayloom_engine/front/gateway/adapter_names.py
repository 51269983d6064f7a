"""GatewayAdapters: the LoRA adapters that requests to a gateway can name: those of its engines."""

from __future__ import annotations

from collections import Counter

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.http.errors import ApiError


class GatewayAdapters:
    """The adapters by name, from the engines' latest statuses. For one event loop.

    While no engine is left, those of the last engines stay: a request for one of them waits for the next engine.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ServedAdapter] | None = None  # None: no engine has reported its adapters yet

    @property
    def entries(self) -> list[ServedAdapter]:
        return list((self._entries or {}).values())

    def get(self, name: str) -> ServedAdapter | None:
        return (self._entries or {}).get(name)

    def check_known(self, name: str) -> None:
        """Raises ApiError 503 if no engine has reported its adapters yet, so that an adapter `name` may exist."""
        if self._entries is None:
            raise ApiError(
                503,
                f"model: {shown(name)} is no served model, and may be a LoRA adapter of engines that have not reported "
                "theirs to this gateway yet; try again in a second, or name a served model",
                type="service_unavailable_error",
                param="model",
                code="engine_unavailable",
                headers={"Retry-After": "1"},
            )

    def update(self, links: list[EngineLink]) -> None:
        """Reads the adapters of the engines. `links`: those of the gateway's model."""
        reported = [
            link.status.adapters
            for link in links
            if link.is_connected and link.status is not None and link.status.adapters is not None
        ]
        if reported:
            self._entries = merged(reported)


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
