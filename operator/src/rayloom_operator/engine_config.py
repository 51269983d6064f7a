"""From an LLMService to the EngineConfig document (version v1) that `rayloom-engine serve --config FILE` reads.

The operator never imports the engine; `schemas/engine-config.v1.json` is the contract, and `tests/contract/` holds both
to it.
"""

from __future__ import annotations

from typing import TypeAlias

from rayloom_operator.api import LLMService
from rayloom_operator.names import ADMIN_PORT, ADMIN_TOKEN_FILE, API_PORT, RANK_PORT
from rayloom_operator.resolved import Resolved, resolve

# How long Ray may take to find room for the ranks. Pods may wait for a node or an image for long, and the operator
# says so; an engine that gave up meanwhile would only hide it.
_PLACEMENT_SECONDS = 3600

JsonValue: TypeAlias = str | int | bool | list[str]


def pod_engine_config(resolved: Resolved) -> dict[str, JsonValue]:
    """The EngineConfig v1 document for an engine in a head pod, with its ranks in worker pods."""
    return _document(resolved, host="0.0.0.0", port=API_PORT, admin_port=ADMIN_PORT) | {
        "executor": "ray",
        "admin_host": "0.0.0.0",
        "admin_token_file": ADMIN_TOKEN_FILE,
        "rank_port": RANK_PORT,
        "placement_seconds": _PLACEMENT_SECONDS,
    }


def engine_config(service: LLMService, *, host: str, port: int, admin_port: int) -> dict[str, JsonValue]:
    """The EngineConfig v1 document for one engine of `service`. What the manifest leaves out stays out.

    The admin port is opened on loopback only.
    """
    # No image has a part in it.
    return _document(resolve(service, ""), host=host, port=port, admin_port=admin_port)


def _document(resolved: Resolved, *, host: str, port: int, admin_port: int) -> dict[str, JsonValue]:
    service = resolved.service
    model, recovery = service.spec.model, service.spec.recovery
    document: dict[str, JsonValue | None] = {
        "version": "v1",
        "model": model.source,
        "revision": resolved.commit or model.revision,
        "served_model_name": service.served_name,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": resolved.tensor,
        "pipeline_parallel_size": resolved.pipeline,
        "drain_seconds": service.spec.drain_seconds,
        "hang_seconds": recovery.hang_seconds,
        "rebuild_seconds": recovery.rebuild_seconds,
        "restart_budget": recovery.restart_budget,
        "host": host,
        "port": port,
        "admin_host": "127.0.0.1",
        "admin_port": admin_port,
        **service.spec.engine.args.model_dump(mode="json"),
    }
    return {name: value for name, value in document.items() if value is not None}
