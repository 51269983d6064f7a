"""ApiRoute: one endpoint of the API port, as the router serves it and as the OpenAPI document describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.front.document.answers import ErrorAnswer

Endpoint = tuple[str, str]  # (method, path)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """An endpoint with its handler. The other fields, except `is_generation`, only describe it and check nothing."""

    method: str
    path: str
    handler: Handler
    tag: str  # heading in the document
    summary: str
    description: str = ""
    request: type[BaseModel] | None = None  # body of a request; None if requests have no body
    answer: type[BaseModel] | None = None  # JSON body with status 200
    events: type[BaseModel] | None = None  # the `data:` of each event, if the answer can be a stream
    last_event: str = "[DONE]"  # last event of a stream, in words
    errors: type[BaseModel] = ErrorAnswer  # body of an answer with a status of 400 or more
    text: str = ""  # media type of an answer that is not JSON
    statuses: frozenset[int] = frozenset()  # statuses of errors, besides those that every path has
    needs_key: bool = False  # True if a request needs an API key, on a server with API keys
    is_generation: bool = False  # True if errors count as failed requests, and answers are kept for repeats
    examples: Mapping[str, Any] = field(default_factory=dict)  # name -> body of a request
    parameters: tuple[Mapping[str, Any], ...] = ()  # query parameters, as OpenAPI writes them

    @property
    def endpoint(self) -> Endpoint:
        """The key of the route's handler: method and path."""
        return self.method, self.path
