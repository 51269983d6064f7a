"""Reads the body of a request for the served model as a typed request. All endpoints with a body begin here."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from rayloom_engine.common.json_words import first_of, shown
from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import Wire
from rayloom_engine.front.operations.adapters import MOST_NAMES
from rayloom_engine.front.operations.service import Service

_Wire = TypeVar("_Wire", bound=Wire)


async def read_request(request: Request, kind: type[_Wire]) -> tuple[Service, ModelText, _Wire]:
    """Returns the front's state, the model's texts, and the body as an object of the type `kind`.

    If the model is not loaded yet, raises ApiError before the body is read. Also raises ApiError if the body is no JSON
    object, or names another model. Raises RequestError that names a wrong field.
    """
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(kind, await read_json(request, service.config.max_body_bytes))
    # True if the name is an alias for which a gateway has chosen this model. Then the name means no adapter.
    is_alias = wire.model is not None and wire.model == getattr(request.state, "alias", None)
    found = None if is_alias else find_adapter(service, wire.model)
    request.state.adapter = None if found is None else found.adapter
    return service, text, wire


def find_adapter(service: Service, model: str | None) -> ServedAdapter | None:
    """Returns the LoRA adapter with the name `model`; None if `model` is None or names the served model.

    Raises ApiError 404 for any other name, and 503 if a gateway does not know yet which adapters there are.
    """
    name = service.config.api_model_name
    if model is None or model == name:
        return None
    found = service.adapters.get(model)
    if found is None:
        service.adapters.check_known(model)
        names = [name, *(entry.name for entry in service.adapters.entries)]
        raise ApiError(
            404,
            f"the model {shown(model)} does not exist; this server has {first_of(names, MOST_NAMES)}",
            param="model",
            code="model_not_found",
        )
    return found
