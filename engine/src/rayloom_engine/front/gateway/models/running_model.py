"""RunningModel: one model of a gateway, with its service, the connections to its engines, and its handlers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from rayloom_engine.front.core_link.handshake import CoreAddress, LinkTls, addresses
from rayloom_engine.front.document.api_route import Endpoint
from rayloom_engine.front.gateway.engines_dns import EnginesDns
from rayloom_engine.front.gateway.gateway_config import GatewayConfig
from rayloom_engine.front.gateway.gateway_service import GatewayService
from rayloom_engine.front.gateway.link_tls import server_name
from rayloom_engine.front.gateway.models.held_requests import HeldRequests
from rayloom_engine.front.gateway.models.model_names import ModelRoute
from rayloom_engine.front.gateway.models.models_document import ModelEntry
from rayloom_engine.front.gateway.shared_tokenizers import SharedTokenizers
from rayloom_engine.front.gateway.text_cache import TextCache
from rayloom_engine.front.http.body_budget import HeldBody
from rayloom_engine.front.model_api import ModelApi
from rayloom_engine.front.operations.lifecycle import Lifecycle

IDLE_CHECK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The objects that all models of a process share."""

    config: GatewayConfig
    lifecycle: Lifecycle
    tokenizers: SharedTokenizers
    api_url: str
    tls: LinkTls | None  # for the connections to engines; `server_name` is set for each model
    on_ready: Callable[[], None]  # called when a model accepts requests for the first time


class RunningModel:
    """One model. Connects to no engine until `run` is called. For one event loop."""

    def __init__(self, name: str, entry: ModelEntry, shared: SharedParts) -> None:
        """Raises ConfigError if the folder for tokenizers cannot be written."""
        self.name = name
        self.entry = entry
        names = {"model": name, "served_model_name": name}
        front = shared.config.front.model_copy(update={**names, **entry.given_settings})
        self._front_id = f"gateway-{secrets.token_hex(8)}"
        self._shared = shared
        self._engines: Mapping[str, str] = entry.engines or {}
        self.service = GatewayService(
            GatewayConfig(gateway=shared.config.gateway, front=front),
            self._addresses(),
            TextCache(Path(shared.config.gateway.cache_dir), name),
            api_url=shared.api_url,
            tokenizers=shared.tokenizers,
        )
        self.service.lifecycle.process = shared.lifecycle
        self.service.lifecycle.on_ready = shared.on_ready
        self.api = ModelApi(self.service)
        self.held = HeldRequests(
            self.service.lifecycle,
            shared.config.gateway.hold_seconds,
            self.service.config.max_queued_requests,
            self.service.engine_adapters.is_awaited,
        )
        # Returns the number of requests that wait at earlier objects of this model, which had other settings. They
        # belong to this model's queue, so that the operator keeps or starts an engine for them.
        self.num_left_waiting: Callable[[], int] = lambda: 0
        self.service.num_held = lambda: len(self.held) + self.num_left_waiting()
        self._num_handled = 0  # requests whose handler has not returned yet
        self._group: asyncio.TaskGroup | None = None
        self._lookups: asyncio.Task[None] | None = None

    @property
    def max_body_bytes(self) -> int:
        return self.service.config.max_body_bytes

    async def run(self) -> None:
        """Keeps the connections to the engines until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._look_up()
            await self.service.run()

    def continue_from(self, before: RunningModel) -> None:
        """Uses the tokenizer, the known addresses and the kept answers of `before`: the same model with other settings.

        Call it before `run`. Requests are then accepted immediately, and wait until the engines are connected.
        """
        if self.entry.engines_dns is not None and self.entry.engines_dns == before.entry.engines_dns:
            self._found(before._engines)
        self.service.continue_text(before.service)
        self.api.continue_answers(before.api)

    def change(self, entry: ModelEntry) -> None:
        """Uses the engines and the key of `entry` from now on. The settings of this model stay the same.

        Sequences on an engine whose address or key has changed move to another engine, as after a loss.
        """
        has_other_dns_name = entry.engines_dns != self.entry.engines_dns
        self.entry = entry
        if entry.engines is not None:
            self._engines = entry.engines
        self.service.client.set_engines(self._addresses())
        if has_other_dns_name:
            self._look_up()

    async def answer(
        self, request: Request, endpoint: Endpoint, route: ModelRoute, body: HeldBody | None = None
    ) -> Response:
        """Returns the response of the model's handler to a request, whose `body` was read already.

        Raises the exceptions of the handler.
        """
        scope = request.scope
        scope["app"] = self.api
        # This is the scope's own state and not a copy, because the port's middleware reads values that handlers write.
        state = scope["state"]
        state["tenant"] = route.tenant
        state["owner"] = route.owner
        if route.alias is not None:
            state["alias"] = route.alias
            state["target"] = self.name
        handler = self.api.handlers[endpoint]
        self._num_handled += 1
        try:
            if body is not None:
                state["waits_since_s"] = await self.held.wait(request, route.tenant, route.adapter)
            return await handler(request if body is None else Request(scope, _BodyAgain(request, body).receive))
        finally:
            self._num_handled -= 1
            if body is not None:
                body.drop()

    async def wait_unused(self) -> None:
        """Waits until no request needs the model. Call it when the model gets no new requests any more."""
        lifecycle = self.service.lifecycle
        while self._num_handled or lifecycle.num_in_flight or lifecycle.num_readers:
            await asyncio.sleep(IDLE_CHECK_S)

    def _look_up(self) -> None:
        if self._lookups is not None:
            self._lookups.cancel()
            self._lookups = None
        if self._group is not None and self.entry.engines_dns is not None:
            self._lookups = self._group.create_task(EnginesDns(self.entry.engines_dns).watch(self._found))

    def _found(self, engines: Mapping[str, str]) -> None:
        self._engines = engines
        self.service.client.set_engines(self._addresses())

    def _addresses(self) -> dict[str, CoreAddress]:
        entry = self.entry
        tls = self._shared.tls
        if tls is not None:
            suffix = self._shared.config.gateway.tls_server_suffix
            tls = replace(tls, server_name=entry.tls_server_name or server_name(entry.engines_dns, suffix))
        return addresses(self._engines, entry.key, self._front_id, entry.previous_key or "", tls)


class _BodyAgain:
    """Gives a handler the body, which was read already, and then the further messages of the connection."""

    def __init__(self, request: Request, body: HeldBody) -> None:
        self._request = request
        self._body: HeldBody | None = body

    async def receive(self) -> Message:
        if self._body is None:
            return await self._request.receive()
        body, self._body = self._body, None
        # `take` gives the bytes back to the budget. The handler counts them again before another task can run.
        return {"type": "http.request", "body": body.take(), "more_body": False}
