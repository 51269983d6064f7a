"""Builds the OpenAPI document from ApiRoutes, with FastAPI's generator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Body, Path
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rayloom_engine.front.document.api_route import ApiRoute
from rayloom_engine.front.document.statuses import MEANINGS, OF_ALL

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same key."},
}
_SCHEMAS = "#/components/schemas/"
DESCRIPTION = (
    "OpenAI's API with the additional fields of vLLM. null means the same as a field that is left out. "
    "A field that is not known, or not implemented, is refused with 400."
)


def openapi_document(
    routes: Sequence[ApiRoute],
    *,
    title: str,
    version: str,
    root_path: str = "",
    extensions: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the document, of JSON types only. Equal arguments give equal documents. `extensions`: extra keys."""
    document = get_openapi(
        title=title,
        version=version,
        description=DESCRIPTION,
        routes=[_described(route) for route in routes],
        servers=[{"url": root_path}] if root_path else None,
        separate_input_output_schemas=False,
    )
    schemas = document["components"]["schemas"]
    schemas.update(_schemas(routes))
    # FastAPI documents its own answer to invalid requests, with status 422. This server never sends that answer.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    return {**document, **(extensions or {})}


def _schemas(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """Returns the schemas of all bodies and events by name.

    FastAPI's schemas are not used, because they lack events and round large integers.
    """
    models: set[type[BaseModel]] = {route.errors for route in routes}
    for route in routes:
        models.update(model for model in (route.request, route.answer, route.events) if model is not None)
    wanted = [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)]
    _, defined = models_json_schema(wanted, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
    schemas: dict[str, Any] = defined["$defs"]
    return schemas


def _described(route: ApiRoute) -> APIRoute:
    """Returns FastAPI's description of a route. FastAPI serves no requests with it."""
    return APIRoute(
        route.path,
        _signature(route),
        methods=[route.method],
        tags=[route.tag],
        summary=route.summary,
        description=route.description,
        operation_id=_operation_id(route),
        response_model=None,
        responses=_responses(route),
        openapi_extra=_extra(route),
    )


def _signature(route: ApiRoute) -> Any:
    """Returns a function whose parameters are the path's parameters and the body, as FastAPI reads them."""

    async def endpoint(**_values: Any) -> None:
        """FastAPI only describes this function; nobody calls it."""

    parameters = []
    for part in route.path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}").partition(":")[0]
            parameters.append((name, Annotated[str, Path()]))
    if route.request is not None:
        examples = {name: {"value": body} for name, body in route.examples.items()}
        parameters.append(("body", Annotated[route.request, Body(openapi_examples=examples)]))  # type: ignore[arg-type]
    endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in parameters]
    )
    return endpoint


def _operation_id(route: ApiRoute) -> str:
    words = "".join(letter if letter.isalnum() else "_" for letter in route.path.strip("/"))
    return f"{route.method.lower()}_{words}"


def _responses(route: ApiRoute) -> dict[int | str, dict[str, Any]]:
    success: dict[str, Any] = {"description": "The answer."}
    if route.answer is not None:
        success["model"] = route.answer
    if route.text:
        success["content"] = {route.text: {"schema": {"type": "string"}}}
    if route.events is not None:
        success["description"] = f"The answer; with `stream` true, events. The last is {route.last_event}."
        success["content"] = {"text/event-stream": {"schema": {"$ref": _SCHEMAS + route.events.__name__}}}
    statuses = OF_ALL | route.statuses | ({401} if route.needs_key else frozenset())
    responses: dict[int | str, dict[str, Any]] = {200: success}
    for status in sorted(statuses):
        responses[status] = {"model": route.errors, "description": MEANINGS[status]}
    return responses


def _extra(route: ApiRoute) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if route.needs_key:
        extra["security"] = [{"bearer": []}, {"apiKey": []}, {}]
    if route.parameters:
        extra["parameters"] = [dict(each) for each in route.parameters]
    return extra or None
