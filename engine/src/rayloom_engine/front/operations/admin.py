"""The admin port: /status, /drain and /adapters for the operator, and /health and /metrics as on the API port."""

from __future__ import annotations

import hmac
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.http.errors import ERROR_HANDLERS, ApiError
from rayloom_engine.front.http.headers import bearer_token
from rayloom_engine.front.operations.adapters_endpoint import put_adapters
from rayloom_engine.front.operations.health import health, metrics
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.managed_adapters import ManagedAdapters
from rayloom_engine.loopback import is_loopback
from rayloom_engine.status import State


class AdminState(Protocol):
    """The state that the admin port shows: a `Service`, or all models of a gateway."""

    lifecycle: Lifecycle

    def state(self) -> tuple[State, str]:
        """The current state and its reason."""

    def status_json(self, *, is_minimal: bool) -> str:
        """The /status document as JSON; with `is_minimal`, only the fields that the operator reads."""

    def of_model(self, name: str) -> AdminState | None:
        """The part of the state that concerns the model with this name; None if there is no such model."""

    def engines(self) -> dict[str, Any] | None:
        """The /engines document; None if this is no gateway."""

    async def metrics_text(self) -> str:
        """All metrics in Prometheus' text format."""


def load_admin_token(path: str | None) -> str | None:
    """Returns the admin port's token, or None if no file is set.

    Raises ConfigError if the file is unreadable or empty.
    """
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"admin_token_file: cannot read {path}: {error}") from error
    if not token:
        raise ConfigError(f"admin_token_file: {path} is empty; write the token into it")
    return token


def is_own_request(host: str, origin: str | None) -> bool:
    """True if a request to a loopback port comes from a program on this machine, and not from a web page.

    With every POST and DELETE, browsers send the page's origin in the header Origin. In a DNS rebinding attack, they
    send the attacker's name, which resolves to 127.0.0.1, in the header Host.
    """
    if origin is not None:
        return False
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def age_of_drain(mark: Path) -> float | None:
    """Returns the seconds since the drain was requested; `mark` is the file that records the request.

    Returns None if there is no such file, because no drain was requested.
    """
    try:
        return max(0.0, time.time() - mark.stat().st_mtime)
    except FileNotFoundError:
        return None


def _mark(mark: Path, is_draining: bool) -> None:
    if not is_draining:
        mark.unlink(missing_ok=True)
    elif not mark.exists():  # a repeated request does not change the time
        mark.touch()


def admin_app(
    service: AdminState,
    token: str | None,
    drain_mark: Path | None = None,
    adapters: ManagedAdapters | None = None,
) -> Starlette:
    """The ASGI application of the admin port. Without a token (loopback only) all programs on this machine may use it.

    The file `drain_mark` exists while a drain is requested, so the drain outlives this process. Its modification time
    is the time of the request. `adapters`: changed by PUT /adapters; None: PUT /adapters is refused.
    """

    def check(request: Request) -> None:
        given = bearer_token(request.headers.get("authorization", ""))
        if token is None:
            changes = request.method not in ("GET", "HEAD")
            if changes and not is_own_request(request.headers.get("host", ""), request.headers.get("origin")):
                raise ApiError(
                    403,
                    "without admin_token_file only programs on this machine may do this, addressing it as localhost "
                    "and without an Origin header",
                    code="foreign_origin",
                )
        elif not hmac.compare_digest(given, token.encode()):
            raise ApiError(
                401,
                "no valid admin token; send it as `Authorization: Bearer TOKEN`",
                code="invalid_admin_token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def status(request: Request) -> Response:
        check(request)
        # Prefer and Preference-Applied: RFC 7240.
        is_minimal = "return=minimal" in request.headers.get("prefer", "")
        name = request.query_params.get("model")
        found = service if name is None else service.of_model(name)
        if found is None:
            message = f"no model has the name {name!r}; /status without `model` lists all models"
            raise ApiError(404, message, code="model_not_found")
        text = found.status_json(is_minimal=is_minimal)
        headers = {"Preference-Applied": "return=minimal"} if is_minimal else {}
        return Response(text, headers=headers, media_type="application/json")

    async def drain(request: Request) -> Response:
        check(request)
        if request.method == "DELETE" and service.lifecycle.is_stopping:
            raise ApiError(409, "the engine is stopping; its drain cannot be taken back", code="engine_stopping")
        is_draining = request.method == "POST"
        if drain_mark is not None:
            # Write the file before answering: the answer must remain true if this process is restarted.
            _mark(drain_mark, is_draining)
        service.lifecycle.drain(is_draining)
        state, _reason = service.state()
        return JSONResponse({"state": state, "in_flight": service.lifecycle.num_in_flight})

    async def change_adapters(request: Request) -> Response:
        check(request)
        return await put_adapters(request, adapters)

    async def engines(request: Request) -> Response:
        check(request)
        return JSONResponse(service.engines())

    routes = [
        Route("/status", status, methods=["GET"]),
        Route("/drain", drain, methods=["POST", "DELETE"]),
        Route("/adapters", change_adapters, methods=["PUT"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    if service.engines() is not None:
        routes.append(Route("/engines", engines, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = service
    return app
