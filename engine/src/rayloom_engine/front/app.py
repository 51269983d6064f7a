"""The API port's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayloom_engine.front.errors import ERROR_HANDLERS
from rayloom_engine.front.gate import AwaitReady, Gate
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.openai.answer import check_model
from rayloom_engine.front.openai.chat import chat_completions
from rayloom_engine.front.openai.completions import completions
from rayloom_engine.front.openai.tokens import detokenize, tokenize
from rayloom_engine.front.operations.prometheus import CONTENT_TYPE
from rayloom_engine.front.service import ENGINE_VERSION, Service

Handler = Callable[[Request], Awaitable[Response]]


def api_app(service: Service, api_keys: ApiKeys) -> Starlette:
    """The ASGI application of the API port."""
    routes = [
        Route("/v1/chat/completions", _counted(chat_completions), methods=["POST"]),
        Route("/v1/completions", _counted(completions), methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
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
        middleware.insert(0, cors)  # outermost, so that refusals carry the headers too and browsers can read them
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _counted(handler: Handler) -> Handler:
    """Counts what ends a request before its answer begins; answers that have begun count their own end."""

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


async def health(request: Request) -> Response:
    """200 once the model was loaded, also in recoveries and drains; 503 before that, and when the engine failed."""
    service: Service = request.app.state.service
    service.lifecycle.check_alive()
    return JSONResponse({"status": "ok", "state": service.state()[0]})


async def ready(request: Request) -> Response:
    """200 when requests are accepted, also during a recovery; else 503 with the reason."""
    service: Service = request.app.state.service
    service.lifecycle.check_accepts()
    return JSONResponse({"status": "ready", "state": service.state()[0]})


async def version(_request: Request) -> Response:
    return JSONResponse({"version": ENGINE_VERSION})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics_text(), headers={"Content-Type": CONTENT_TYPE})


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
    """Where a model comes from without its kind of place, as vLLM names it: the hub's id, or a path.

    Clients that need the tokenizer take it from there.
    """
    return model.partition("://")[2] or model
