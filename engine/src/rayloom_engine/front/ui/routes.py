"""The routes of the built-in page. The API port has these routes if the setting `ui` is on."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rayloom_engine.front.document.api_route import Handler
from rayloom_engine.front.operations.service import Service
from rayloom_engine.front.ui.page import page_headers, page_html
from rayloom_engine.front.ui.strip import strip

STATUS_PATH = "/ui/status"


def ui_routes(status: Handler) -> list[Route]:
    """Returns the routes of the page and of its `status`. Reads the page's files."""
    html = page_html()
    headers = page_headers(html)

    async def page(_request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    return [
        Route("/ui", page, methods=["GET"]),
        Route(STATUS_PATH, status, methods=["GET"]),
    ]


async def ui_status(request: Request) -> Response:
    """Answers with the document of the strip of recoveries. `Gate` requires an API key if the server has keys."""
    service: Service = request.app.state.service
    return JSONResponse(strip(service.status()), headers={"Cache-Control": "no-store"})
