"""Gate: the API port's middleware in front of all routes.

Gate sets request ids, checks API keys and closes connections in a drain. AwaitReady holds requests back after a restart
of the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.headers import MODEL_HEADER, REQUEST_ID, api_key
from rayloom_engine.front.http.tenant import owner_of_key, tenant_of_key
from rayloom_engine.front.operations.lifecycle import Lifecycle

REST_OF_BODY_S = 5.0  # seconds for which the rest of a body is read in a drain, before the connection is closed
# /tokenizer_info begins with /tokenize, so it needs no entry.
_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/server_info", "/ui/status")
_REQUEST_ID = re.compile(REQUEST_ID)


class KeyCheck(Protocol):
    """The API keys of a port."""

    @property
    def is_open(self) -> bool:
        """True if requests need no key."""

    def num_keys_beside(self, key: bytes) -> int:
        """Returns the number of the port's keys if `key` is one of them, else 0, even if `knows` accepts `key`."""

    def knows(self, key: bytes) -> bool:
        """True if `key` is one of the port's keys, or if there is a model name that needs no key."""


def no_valid_key() -> ApiError:
    """Returns the refusal of a request without a valid API key."""
    return ApiError(
        401,
        "no valid API key; send one as `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class Gate:
    """Middleware: checks the API key where a path needs one, sets X-Request-Id, closes connections in a drain."""

    def __init__(self, app: ASGIApp, api_keys: KeyCheck, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        body = _Body(receive)
        state = scope.setdefault("state", {})
        state["request_id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = state["request_id"]  # read after the handler, which may have replaced the id
                if "target" in state:
                    answer[MODEL_HEADER] = state["target"]
                if self._lifecycle.drains:
                    answer["Connection"] = "close"
                    await body.discard()
            await send(message)

        is_guarded = not self._api_keys.is_open and scope["path"].startswith(_GUARDED)
        if is_guarded and not self._api_keys.knows(api_key(headers)):
            refusal = no_valid_key()
            await refusal.response(scope["path"])(scope, body.receive, send_with_id)
            return
        num_keys = self._api_keys.num_keys_beside(api_key(headers))
        state["tenant"] = tenant_of_key(api_key(headers), num_keys)
        state["owner"] = owner_of_key(api_key(headers), num_keys)
        await self._app(scope, body.receive, send_with_id)


class _Body:
    """A request's body. Records whether the whole body has arrived."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Reads and drops the rest of the body.

        If bytes arrived on a closed connection, TCP would reset the connection, and the client would lose the answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_OF_BODY_S):
                while not self._is_whole:
                    await self.receive()


class AwaitReady:
    """Middleware inside Gate: after a restart of the front, requests for the model wait until the front is ready."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, wait_s: float) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_GUARDED):
            await self._lifecycle.wait_after_restart(self._wait_s)
        await self._app(scope, receive, send)
