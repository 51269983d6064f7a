"""Handlers for health, readiness, version and metrics.

The API port has all of them. The admin port has health and metrics.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.front.operations.metrics import CONTENT_TYPE
from rayloom_engine.front.operations.service import ENGINE_VERSION, Service


async def health(request: Request) -> Response:
    """Answers 200 once the model has been loaded, also during recoveries and drains.

    Answers 503 before the model has been loaded, and after the engine has failed.
    """
    service: Service = request.app.state.service
    service.lifecycle.check_alive()
    return JSONResponse({"status": "ok", "state": service.state()[0]})


async def ready(request: Request) -> Response:
    """Answers 200 if requests are accepted, also during a recovery. Otherwise answers 503 with the reason."""
    service: Service = request.app.state.service
    service.lifecycle.check_accepts()
    return JSONResponse({"status": "ready", "state": service.state()[0]})


async def load(request: Request) -> Response:
    """Answers the number of requests in flight, under vLLM's name `server_load`."""
    return JSONResponse({"server_load": request.app.state.service.lifecycle.num_in_flight})


async def engine_version(_request: Request) -> Response:
    return JSONResponse({"version": ENGINE_VERSION})


async def metrics(request: Request) -> Response:
    return Response(await request.app.state.service.metrics_text(), headers={"Content-Type": CONTENT_TYPE})
