from starlette.requests import Request
from starlette.responses import Response


async def completions(_request: Request) -> Response:
    """Stands where the handler of completions stood. The engine's own probes come another way and are well."""
    raise RuntimeError("this release has a mistake in its handler of requests")
