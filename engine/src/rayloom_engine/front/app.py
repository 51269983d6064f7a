"""The API port: routes, middleware, and the model list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayloom_engine.front.gate import AwaitReady, Gate
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.http.errors import ERROR_HANDLERS
from rayloom_engine.front.openai.answer import check_model
from rayloom_engine.front.openai.chat import chat_completions
from rayloom_engine.front.openai.completions import completions
from rayloom_engine.front.openai.tokens import detokenize, tokenize
from rayloom_engine.front.operations.health import engine_version, health, metrics, ready
from rayloom_engine.front.operations.service import Service
from rayloom_engine.front.ui.routes import ui_routes

Handler = Callable[[Request], Awaitable[Response]]


def api_app(service: Service, api_keys: ApiKeys) -> Starlette:
    """Returns the ASGI application of the API port."""
    routes = [
        Route("/v1/chat/completions", _counted(chat_completions), methods=["POST"]),
        Route("/v1/completions", _counted(completions), methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", engine_version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(ui_routes() if service.config.has_ui else ()),
    ]
    middleware = [
        Middleware(Gate, api_keys=api_keys, lifecycle=service.lifecycle),
        Middleware(AwaitReady, lifecycle=service.lifecycle, wait_s=service.waits.ready_s),
    ]
    origins = service.config.cors_allowed_origins
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cors)  # outermost, so that error answers carry CORS headers too and browsers can read them
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _counted(handler: Handler) -> Handler:
    """Counts errors that are raised before an answer begins.

    Errors in the middle of a stream are counted by the stream itself.
    """

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            request.app.state.service.metrics.observe_failure(error)
            raise

    return handle


async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(request.app.state.service)]})


async def get_model(request: Request) -> Response:
    check_model(request.app.state.service, request.path_params["model"])
    return JSONResponse(_model_card(request.app.state.service))


def _model_card(service: Service) -> dict[str, Any]:
    core = service.client.status
    return {
        "id": service.config.api_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "rayloom",
        "root": model_root(service.config.model),
        "parent": None,
        "max_model_len": core.model.max_model_len if core is not None and core.model is not None else None,
    }


def model_root(model: str) -> str:
    """Returns the model's hub id or path: its source without the scheme, as in the field `root` of vLLM's model list.

    Clients that need the tokenizer load it from this source.
    """
    return model.partition("://")[2] or model
