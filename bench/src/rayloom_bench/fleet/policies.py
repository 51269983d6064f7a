"""Policies: the choice of an engine for each request of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rayloom_engine.core.block_hash import prompt_hashes
from rayloom_engine.protocol.messages import CacheChanges, CoreMessage, LoadReport
from rayloom_engine.routing.engine_estimate import EngineEstimate
from rayloom_engine.routing.prefix_index import cut_hashes
from rayloom_engine.routing.rendezvous import tie_key
from rayloom_engine.routing.router import choose


class RoutedRequest:
    """The part of a request that a policy knows. `token_ids`: the prompt and, after a resume, the generated tokens."""

    def __init__(self, request_id: str, tenant: str, prompt_ids: tuple[int, ...], block_size: int) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.num_tokens = len(prompt_ids)
        hashes = prompt_hashes(prompt_ids, block_size, b"")
        self.tie_key = tie_key(hashes, request_id.encode())
        self.blocks = cut_hashes(hashes)


class Policy(Protocol):
    """Records engines and requests, and picks an engine for each request."""

    wants_reports: bool  # False: engines send no reports to the policy

    def added(self, engine: str) -> None: ...

    def removed(self, engine: str) -> None:
        """Forgets an engine that drains or is lost, so that it receives no further request."""

    def pick(self, request: RoutedRequest) -> str | None:
        """Returns a serving engine, or None if no engine serves."""

    def sent(self, engine: str, request: RoutedRequest) -> None: ...

    def has_token(self, engine: str, request_id: str) -> None:
        """Records that the request has its first token from this engine."""

    def ended(self, engine: str, request_id: str) -> None: ...

    def receive(self, engine: str, message: CoreMessage) -> bool:
        """Handles a report of an engine. Returns False if the engine must send its whole prefix index again."""


class _WithoutReports:
    """The names of the engines, and the number of unfinished requests of each."""

    wants_reports = False

    def __init__(self) -> None:
        self._num_unfinished: dict[str, int] = {}

    def added(self, engine: str) -> None:
        self._num_unfinished[engine] = 0

    def removed(self, engine: str) -> None:
        self._num_unfinished.pop(engine, None)

    def sent(self, engine: str, request: RoutedRequest) -> None:
        if engine in self._num_unfinished:
            self._num_unfinished[engine] += 1

    def has_token(self, engine: str, request_id: str) -> None:
        pass

    def ended(self, engine: str, request_id: str) -> None:
        if engine in self._num_unfinished:
            self._num_unfinished[engine] -= 1

    def receive(self, engine: str, message: CoreMessage) -> bool:
        return True


class RoundRobin(_WithoutReports):
    """Each request goes to the next engine, as with a Kubernetes Service."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def pick(self, request: RoutedRequest) -> str | None:
        names = list(self._num_unfinished)
        self._turn += 1
        return names[self._turn % len(names)] if names else None


class LeastLoaded(_WithoutReports):
    """Each request goes to the engine with the fewest unfinished requests. Several such engines take turns."""

    def __init__(self) -> None:
        super().__init__()
        self._last_turn: dict[str, int] = {}
        self._turn = 0

    def pick(self, request: RoutedRequest) -> str | None:
        if not self._num_unfinished:
            return None
        name = min(self._num_unfinished, key=lambda each: (self._num_unfinished[each], self._last_turn.get(each, 0)))
        self._turn += 1
        self._last_turn[name] = self._turn
        return name


class ByTokens:
    """The gateway's own choice: the real router with the reports that the cores publish."""

    wants_reports = True

    def __init__(self) -> None:
        self._estimates: dict[str, EngineEstimate] = {}
        self._decode_token_cost = 1.0

    def added(self, engine: str) -> None:
        self._estimates[engine] = EngineEstimate(engine)

    def removed(self, engine: str) -> None:
        self._estimates.pop(engine, None)

    def pick(self, request: RoutedRequest) -> str | None:
        views = [each.view(request.tenant, request.num_tokens, request.blocks) for each in self._estimates.values()]
        return choose(
            views,
            prompt_tokens=request.num_tokens,
            decode_token_cost=self._decode_token_cost,
            tie_key=request.tie_key,
        )

    def sent(self, engine: str, request: RoutedRequest) -> None:
        self._estimates[engine].sent(request.request_id, request.tenant, request.num_tokens, request.blocks)

    def has_token(self, engine: str, request_id: str) -> None:
        if engine in self._estimates:
            self._estimates[engine].has_token(request_id)

    def ended(self, engine: str, request_id: str) -> None:
        if engine in self._estimates:
            self._estimates[engine].ended(request_id)

    def receive(self, engine: str, message: CoreMessage) -> bool:
        estimate = self._estimates.get(engine)
        if estimate is None:
            return True
        if isinstance(message, CacheChanges):
            return estimate.changed(message)
        if isinstance(message, LoadReport):
            estimate.reported(message.load)
            self._decode_token_cost = message.load.decode_token_cost
        return True


POLICIES: dict[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "by-tokens": ByTokens,
}
