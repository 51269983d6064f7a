"""ApiError: an answer in OpenAI's error format, and the answers for the engine's own exceptions."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.errors import CorruptLogits, EngineDead, PoisonousRequest, QueueFull, RequestError
from rayloom_engine.sampling_params import ContextTooLong

logger = logging.getLogger(__name__)


DRAINING = "engine_draining"  # code of the refusals in a drain


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

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


def unavailable(message: str, code: str, retry_after_s: int, *, close: bool = False) -> ApiError:
    """503 for a server that does not accept now. `close` asks the client to open a new connection elsewhere."""
    headers = {"Retry-After": str(retry_after_s)}
    if close:
        headers["Connection"] = "close"
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def api_error(error: Exception) -> ApiError | None:
    """The answer for an exception that was raised on purpose; None for any other."""
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
        # Clients retry a 500; OpenAI's own clients do not when this header is there.
        headers = {"x-should-retry": "false"}
        return ApiError(500, str(error), type="server_error", code="poisonous_request", headers=headers)
    if isinstance(error, CorruptLogits):
        # Clients may retry: another engine, or this one once its rank is replaced, may answer.
        return ApiError(500, str(error), type="server_error", code="corrupt_logits")
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), type="service_unavailable_error", code="engine_unavailable")
    return None


def is_fault(error: Exception) -> bool:
    """True if `error` is a fault of the engine's: no refusal, and no client that left."""
    if isinstance(error, ClientGone | HTTPException):
        return False
    known = api_error(error)
    return known is None or (known.status >= 500 and known.code != DRAINING)


async def answer_error(_request: Request, error: Exception) -> Response:
    """Exception handler for exceptions that are raised on purpose."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # never sent: the connection is closed
    if isinstance(error, HTTPException):
        message = {404: "there is no such path", 405: "this path does not take that method"}.get(
            error.status_code, error.detail
        )
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message, headers=headers).response()
    known = api_error(error)
    assert known is not None, error
    return known.response()


async def answer_crash(_request: Request, _error: Exception) -> Response:
    """Exception handler for a bug. The server's log has the trace; the client gets none."""
    return ApiError(500, "internal error; the server's log says more", type="server_error").response()


ERROR_HANDLERS = {
    ApiError: answer_error,
    RequestError: answer_error,
    QueueFull: answer_error,
    PoisonousRequest: answer_error,
    CorruptLogits: answer_error,
    EngineDead: answer_error,
    ClientGone: answer_error,
    HTTPException: answer_error,
    Exception: answer_crash,
}
