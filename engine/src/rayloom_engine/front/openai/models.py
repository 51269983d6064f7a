"""GET /v1/models and /v1/models/NAME: the served model and its LoRA adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.front.openai.fields.request_reading import find_adapter
from rayloom_engine.front.operations.service import Service


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    adapters = [adapter_card(service, entry) for entry in service.adapters.entries]
    return JSONResponse({"object": "list", "data": [model_card(service), *adapters]})


async def get_model(request: Request) -> Response:
    service: Service = request.app.state.service
    entry = find_adapter(service, request.path_params["model"])
    return JSONResponse(model_card(service) if entry is None else adapter_card(service, entry))


def model_card(service: Service) -> dict[str, Any]:
    """Returns the entry of the service's model in the list of models."""
    core = service.client.status
    # A gateway knows the model from its text, even while there is no engine.
    model = service.text.model if service.text is not None else core.model if core is not None else None
    return {
        "id": service.config.api_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "rayloom",
        "root": model_root(service.config.model),
        "parent": None,
        "max_model_len": None if model is None else model.max_model_len,
    }


def adapter_card(service: Service, entry: ServedAdapter) -> dict[str, Any]:
    """Returns the entry of a LoRA adapter in the list of models, as vLLM writes it."""
    base = model_card(service)
    return {**base, "id": entry.name, "created": entry.created, "root": entry.adapter.path, "parent": base["id"]}


def model_root(model: str) -> str:
    """Returns the model's hub id or path: its source without the scheme, as in the field `root` of vLLM's model list.

    Clients that need the tokenizer load it from this source.
    """
    return model.partition("://")[2] or model
