"""GET /server_info: settings, environment and versions of the server, with vLLM's keys."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.common.json_words import shown
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import RequestError
from rayloom_engine.front.operations.service import ENGINE_VERSION, Service

FORMATS = ("text", "json")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PACKAGES = ("torch", "numpy", "ray", "tokenizers", "fastapi", "starlette", "uvicorn")


async def server_info(request: Request) -> Response:
    service: Service = request.app.state.service
    given = request.query_params.get("config_format", "text")
    if given not in FORMATS:
        raise RequestError(f"config_format must be text or json, given {shown(given)}", "config_format")
    config = shown_config(service.config)
    return JSONResponse(
        {
            "vllm_config": config
            if given == "json"
            else ", ".join(f"{name}={value!r}" for name, value in config.items()),
            "vllm_env": shown_environment(os.environ),
            "system_env": system_environment(),
        }
    )


def shown_config(config: EngineConfig) -> dict[str, Any]:
    """Returns the settings as JSON types, without Ray's runtime environment, which may hold secrets."""
    return config.model_dump(mode="json", exclude={"ray_runtime_env"})


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this engine, without those that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("RAYLOOM_") and not any(secret in name for secret in _SECRETS)
    }


def system_environment() -> dict[str, str | None]:
    """Returns versions of the machine's software. No module is imported for them."""
    versions: dict[str, str | None] = {
        "rayloom_version": ENGINE_VERSION,
        "python_version": platform.python_version(),
        "os": platform.platform(),
        "machine": platform.machine(),
    }
    for package in _PACKAGES:
        try:
            versions[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            versions[f"{package}_version"] = None
    return versions
