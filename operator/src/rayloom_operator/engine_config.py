"""From an LLMService to the EngineConfig document (version v1) that `rayloom-engine serve --config FILE` reads.

The operator never imports the engine; `schemas/engine-config.v1.json` is the contract, and `tests/contract/` holds both
to it.
"""

from __future__ import annotations

from typing import TypeAlias

from rayloom_operator.api import LLMService

JsonValue: TypeAlias = str | int | bool | list[str]


def engine_config(service: LLMService, *, host: str, port: int, admin_port: int) -> dict[str, JsonValue]:
    """The EngineConfig v1 document for one engine of `service`. What the manifest leaves out stays out.

    The admin port is opened on loopback only.
    """
    model = service.spec.model
    document: dict[str, JsonValue | None] = {
        "version": "v1",
        "model": model.source,
        "revision": model.revision,
        "served_model_name": service.served_name,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": service.spec.parallelism.tensor,
        "pipeline_parallel_size": service.spec.parallelism.pipeline,
        "drain_seconds": service.spec.drain_seconds,
        "host": host,
        "port": port,
        "admin_host": "127.0.0.1",
        "admin_port": admin_port,
        **service.spec.engine.args.model_dump(mode="json"),
    }
    return {name: value for name, value in document.items() if value is not None}
