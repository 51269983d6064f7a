"""ApiError: an answer in OpenAI's error format, and the mapping from the engine's exceptions to such answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.errors import AdapterFailed, CorruptLogits, EngineDead, PoisonousRequest, QueueFull, RequestError
from rayloom_engine.sampling_params import ContextTooLong

logger = logging.getLogger(__name__)


# Seconds after which a client should repeat a request whose adapter a rank could not load. A rank that has to fetch the
# files from the hub tries again after this time.
_ADAPTER_RETRY_S = 30
DRAINING = "engine_draining"  # error code of requests that a drain refuses
ANTHROPIC_PATH = "/v1/messages"  # at paths that begin with this text, errors have the form of Anthropic's API
# HTTP status -> `error.type` in Anthropic's API. A status that is missing here has the type "invalid_request_error".
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An HTTP status with OpenAI's `error` object: message, type, param (the field at fault) and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Returns the body in the form of Anthropic's API, with the additional keys `param` and `code`."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        details = {"type": kind, "message": str(self), "param": self.param, "code": self.code}
        return {"type": "error", "error": details}

    def body_at(self, path: str) -> dict[str, Any]:
        """Returns the body in the form of the API that `path` belongs to."""
        return self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()

    def response(self, path: str) -> JSONResponse:
        """Returns the answer to a request for `path`, in the form of that path's API."""
        return JSONResponse(self.body_at(path), status_code=self.status, headers=self.headers)


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


def unavailable(message: str, code: str, retry_after_s: int, *, close: bool = False) -> ApiError:
    """Returns a 503 for a server that cannot accept requests now.

    `close` also closes the connection, so that the client reconnects and may reach another server.
    """
    headers = {"Retry-After": str(retry_after_s)}
    if close:
        headers["Connection"] = "close"
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def api_error(error: Exception) -> ApiError | None:
    """Returns the answer for one of the project's own exceptions; None for any other exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextTooLong):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, PoisonousRequest):
        # Clients retry after a 500. OpenAI's own clients do not retry if the answer has this header.
        headers = {"x-should-retry": "false"}
        return ApiError(500, str(error), type="server_error", code="poisonous_request", headers=headers)
    if isinstance(error, CorruptLogits):
        # Clients may retry: another engine can answer, or this engine can answer once its rank is replaced.
        return ApiError(500, str(error), type="server_error", code="corrupt_logits")
    if isinstance(error, AdapterFailed):
        # The adapter is known, so the client's request is right. Requests without the adapter are answered.
        return unavailable(str(error), "adapter_failed", _ADAPTER_RETRY_S)
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), type="service_unavailable_error", code="engine_unavailable")
    return None


def is_fault(error: Exception) -> bool:
    """True if `error` is the engine's fault, and neither a refusal nor the disconnect of a client."""
    if isinstance(error, ClientGone | HTTPException):
        return False
    known = api_error(error)
    return known is None or (known.status >= 500 and known.code != DRAINING)


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler for the project's own exceptions."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # a placeholder that is never sent, because the connection is closed
    if isinstance(error, HTTPException):
        message = {404: "there is no such path", 405: "this path does not take that method"}.get(
            error.status_code, error.detail
        )
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message, headers=headers).response(request.url.path)
    known = api_error(error)
    assert known is not None, error
    return known.response(request.url.path)


async def answer_crash(request: Request, _error: Exception) -> Response:
    """Exception handler for a bug. The traceback is only in the server's log."""
    return ApiError(500, "internal error; the server's log says more", type="server_error").response(request.url.path)


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: answer_error,
    RequestError: answer_error,
    QueueFull: answer_error,
    PoisonousRequest: answer_error,
    CorruptLogits: answer_error,
    AdapterFailed: answer_error,
    EngineDead: answer_error,
    ClientGone: answer_error,
    HTTPException: answer_error,
    Exception: answer_crash,
}
