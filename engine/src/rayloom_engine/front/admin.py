"""The admin port: /status for the operator, /drain, and nothing that a client needs."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.app import health, metrics
from rayloom_engine.front.errors import ERROR_HANDLERS, ApiError
from rayloom_engine.front.gate import bearer_token
from rayloom_engine.front.service import Service


def load_admin_token(path: str | None) -> str | None:
    """The admin port's token; None when no file is set. Raises ConfigError when the file is unreadable or empty."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"admin_token_file: cannot read {path}: {error}") from error
    if not token:
        raise ConfigError(f"admin_token_file: {path} is empty; write the token into it")
    return token


def admin_app(service: Service, token: str | None) -> Starlette:
    """The ASGI application of the admin port. Without a token (loopback only) everybody may ask."""

    def check(request: Request) -> None:
        given = bearer_token(request.headers.get("authorization", ""))
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise ApiError(
                401,
                "no valid admin token; send it as `Authorization: Bearer TOKEN`",
                code="invalid_admin_token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def status(request: Request) -> Response:
        check(request)
        return Response(service.status().model_dump_json(), media_type="application/json")

    async def drain(request: Request) -> Response:
        check(request)
        service.lifecycle.is_draining = request.method == "POST"
        state, _reason = service.lifecycle.state
        return JSONResponse({"state": state, "in_flight": service.lifecycle.num_in_flight})

    routes = [
        Route("/status", status, methods=["GET"]),
        Route("/drain", drain, methods=["POST", "DELETE"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = service
    return app
