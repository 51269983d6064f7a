from starlette.requests import Request
from starlette.responses import Response


async def completions(_request: Request) -> Response:
    """Replaces the handler of completions. The engine's own probes do not use this handler, so they succeed."""
    raise RuntimeError("this release has a mistake in its handler of requests")
