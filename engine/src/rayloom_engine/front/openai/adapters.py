"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's formats."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import LoadAdapterRequest, UnloadAdapterRequest
from rayloom_engine.front.operations.service import Service

_MANAGED_IN_WORDS = (
    "only the admin port changes the adapters of this server (managed_adapters); change spec.model.adapters of the "
    "LLMService, or send PUT /adapters to the admin port"
)
_FIXED_IN_WORDS = (
    "the adapters of this server are fixed; start it with --allow-runtime-lora-updating to let clients change them"
)
_Change = TypeVar("_Change", LoadAdapterRequest, UnloadAdapterRequest)


async def load_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    wire = await _read_change(request, service, LoadAdapterRequest)
    folder = Path(service.model_text().model.path)
    await service.adapter_list.load(wire.lora_name, wire.lora_path, folder, in_place=bool(wire.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    wire = await _read_change(request, service, UnloadAdapterRequest)
    await service.adapter_list.unload(wire.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' removed successfully.")


async def _read_change(request: Request, service: Service, kind: type[_Change]) -> _Change:
    """Returns the body of a request that changes the list of adapters. Raises ApiError 403 if the request may not."""
    if service.client.rules.is_gateway:
        raise ApiError(
            403,
            "adapters cannot be loaded or unloaded through a gateway; change spec.model.adapters of the LLMService, or "
            "send the request to an engine that has --allow-runtime-lora-updating",
            code="adapters_fixed",
        )
    if not service.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            _MANAGED_IN_WORDS if service.config.managed_adapters else _FIXED_IN_WORDS,
            code="adapters_fixed",
        )
    if not request.state.owner and request.headers.get("origin") is not None:
        # Without API keys a web page could send the request from a browser on this machine.
        raise ApiError(
            403,
            "without API keys no web page may change the adapters; set API keys, or send the request without the "
            "header Origin",
            code="foreign_origin",
        )
    service.model_text()  # raises ApiError 503 while the model is not loaded
    return parse_request(kind, await read_json(request, service.config.max_body_bytes))
