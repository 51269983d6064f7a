"""Reads the body of a request for the served model as a typed request. All endpoints with a body begin here."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import Wire
from rayloom_engine.front.operations.service import Service

_Wire = TypeVar("_Wire", bound=Wire)


async def read_request(request: Request, kind: type[_Wire]) -> tuple[Service, ModelText, _Wire]:
    """Returns the front's state, the model's texts and the body as a `kind`.

    Raises ApiError if the model is not loaded yet (the body is not read then), if the body is no JSON object, or if it
    names another model. Raises RequestError that names a wrong field.
    """
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(kind, await read_json(request, service.config.max_body_bytes))
    # a gateway has replaced the alias by the model's name
    if wire.model is None or wire.model != getattr(request.state, "alias", None):
        check_model(service, wire.model)
    return service, text, wire


def check_model(service: Service, model: str | None) -> None:
    """Raises ApiError 404 unless `model` is the served model or is not given."""
    name = service.config.api_model_name
    if model is not None and model != name:
        raise ApiError(
            404,
            f"the model {shown(model)} does not exist; this server has {shown(name)}",
            param="model",
            code="model_not_found",
        )
