"""The API port: an application with the endpoints of routes.py, middleware, and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.document.api_route import Endpoint, Handler
from rayloom_engine.front.gate import AwaitReady, Gate, KeyCheck
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.http.errors import ERROR_HANDLERS
from rayloom_engine.front.http.headers import MODEL_HEADER
from rayloom_engine.front.model_api import UI_STATUS, ModelApi
from rayloom_engine.front.openai.fields.wire_schema import extensions
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.service import ENGINE_VERSION, Service
from rayloom_engine.front.routes import ROUTES
from rayloom_engine.front.ui.routes import ui_routes

TITLE = "Rayloom"
DOCUMENT_PATH = "/openapi.json"
PAGE_PATH = "/docs"


class ApiApplication(Starlette):
    """An application with the endpoints of ROUTES. Their handlers read and check bodies themselves.

    FastAPI only generates the OpenAPI document from ROUTES.

    FastAPI is imported at the first request for the document. At each start of a front, also after a crash, the
    import would take a fourth of the start's CPU time.
    """

    def __init__(
        self, config: EngineConfig, handlers: Mapping[Endpoint, Handler], middleware: Sequence[Middleware]
    ) -> None:
        """`handlers`: the handler of each endpoint in ROUTES, and the handler of UI_STATUS."""
        super().__init__(middleware=list(middleware), exception_handlers=ERROR_HANDLERS)
        self.router.redirect_slashes = False
        self._root = config.root_path
        for route in ROUTES:
            self.router.routes.append(Route(route.path, handlers[route.endpoint], methods=[route.method]))
        self.router.routes.append(Route(DOCUMENT_PATH, self._answer_document, methods=["GET"]))
        self.router.routes.append(Route(PAGE_PATH, self._answer_page, methods=["GET"]))
        if config.has_ui:
            self.router.routes.extend(ui_routes(handlers[UI_STATUS]))
        self._openapi: dict[str, Any] | None = None
        self._document: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request. A path below `root_path` is served as the path without this prefix.

        The prefix is cut off here, before Gate decides by the path whether a request needs a key.
        """
        if self._root and scope["type"] == "http" and scope["path"].startswith(self._root + "/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        # This import loads FastAPI; the class docstring says why it is here.
        from rayloom_engine.front.document.openapi import openapi_document

        if self._openapi is None:
            self._openapi = openapi_document(
                ROUTES, title=TITLE, version=ENGINE_VERSION, root_path=self._root, extensions=extensions()
            )
        return self._openapi

    async def _answer_document(self, _request: Request) -> Response:
        """Answers GET /openapi.json. The first request takes about 0.5 s, so a thread builds the document."""
        if self._document is None:
            from rayloom_engine.front.document.page import document_json

            self._document = await asyncio.to_thread(lambda: document_json(self.openapi()))
        return Response(self._document, media_type="application/json")

    async def _answer_page(self, _request: Request) -> Response:
        """Answers GET /docs: the document as an HTML page that loads no other file."""
        from rayloom_engine.front.document.page import CONTENT_SECURITY_POLICY, html_page

        page = await asyncio.to_thread(lambda: html_page(self.openapi()))
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})


def api_app(service: Service, api_keys: ApiKeys) -> ApiApplication:
    """Returns the ASGI application of the API port of one model."""
    middleware = [
        *port_middleware(service.config, api_keys, service.lifecycle),
        Middleware(AwaitReady, lifecycle=service.lifecycle, wait_s=service.waits.ready_s),
    ]
    model = ModelApi(service)
    app = ApiApplication(service.config, model.handlers, middleware)
    app.state.service = service
    app.state.kept_answers = model.kept_answers
    return app


def port_middleware(config: EngineConfig, api_keys: KeyCheck, lifecycle: Lifecycle) -> list[Middleware]:
    """Returns the middleware of an API port. The first in the list is the outermost."""
    middleware = [Middleware(Gate, api_keys=api_keys, lifecycle=lifecycle)]
    if config.cors_allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Rayloom-Cold-Start", "Idempotent-Replayed", MODEL_HEADER],
        )
        middleware.insert(0, cors)  # outermost, so that error answers carry CORS headers too and browsers can read them
    return middleware
