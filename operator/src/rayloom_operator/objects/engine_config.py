"""Builds the EngineConfig document (version v1), which `rayloom-engine serve --config FILE` reads, from an LLMService.

The operator never imports the engine; `schemas/engine-config.v1.json` is the contract, and `tests/contract/`
checks both sides.
"""

from __future__ import annotations

from typing import TypeAlias

from rayloom_operator.api.draft import Draft
from rayloom_operator.api.model import Model
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import (
    ADMIN_PORT,
    ADMIN_TOKEN_FILE,
    API_PORT,
    CLAIM_FOLDER,
    FRONT_KEY_FILE,
    FRONT_PORT,
    KEYS_FILE,
    KEYS_FOLDER,
    RANK_PORT,
)
from rayloom_operator.objects.adapter_volumes import adapter_paths
from rayloom_operator.objects.tls.files import engine_tls
from rayloom_operator.resolve.resolved import Resolved

# Seconds within which Ray must place the ranks. Worker pods may wait long for a node or an image. The operator reports
# this wait in the status. If the engine exited during the wait, its exit would hide the cause.
_PLACEMENT_SECONDS = 3600

JsonValue: TypeAlias = str | int | bool | list[str]


def engine_model(model: Model) -> str:
    """Returns the field `model` of the engine's config in a pod, where a pvc:// model is a path below a mount."""
    if model.source_kind != "pvc":
        return model.source
    _, _, path = model.source.removeprefix("pvc://").partition("/")
    return f"file://{CLAIM_FOLDER}/{path}".rstrip("/")


def engine_draft(model: Model, draft: Draft) -> str:
    """Returns the field `draft_model` of the engine's config in a pod. `draft`: the draft model of `model`."""
    return draft.source if draft.claim is None else f"file://{model.draft_path}"


def pod_engine_config(resolved: Resolved) -> dict[str, JsonValue]:
    """The EngineConfig v1 document for an engine in a head pod, with its ranks in worker pods."""
    keys: dict[str, JsonValue] = {"api_key_file": f"{KEYS_FOLDER}/{KEYS_FILE}"}
    front: dict[str, JsonValue] = {
        "front_host": "0.0.0.0",
        "front_port": FRONT_PORT,
        "front_key_file": FRONT_KEY_FILE,
    }
    document = _document(resolved, host="0.0.0.0", port=API_PORT, admin_port=ADMIN_PORT) | {
        **(keys if resolved.service.spec.auth is not None else {}),
        **(front if resolved.service.spec.gateway is not None else {}),
        **(engine_tls() if resolved.service.spec.gateway is not None and resolved.has_tls else {}),
        "model": engine_model(resolved.service.spec.model),
        **_draft_in_pods(resolved.service.spec.model),
        **_managed_adapters(resolved),
        "executor": "ray",
        "admin_host": "0.0.0.0",
        "admin_token_file": ADMIN_TOKEN_FILE,
        "rank_port": RANK_PORT,
        "placement_seconds": _PLACEMENT_SECONDS,
    }
    # The device is set here: with `auto`, the engine would look for GPUs at its start, before worker pods exist.
    if document.get("device", "auto") == "auto":
        document["device"] = "cpu" if resolved.service.spec.accelerator is None else "cuda"
    if resolved.stages_per_pod > 1:
        # PACK puts consecutive stages into one pod. No pod stays empty, because all pods together have room for exactly
        # the number of ranks.
        document["ray_placement_strategy"] = "PACK"
    return document


def engine_config(service: LLMService, *, host: str, port: int, admin_port: int) -> dict[str, JsonValue]:
    """The EngineConfig v1 document for an engine on this machine. Fields that the manifest leaves out are missing.

    The admin port listens on loopback. The built-in page is on by default, even if other machines can reach the API
    port. The manifest can turn the page off. `accelerator` is not used: the engine detects the devices of this machine.
    """
    asked, length = service.spec.parallelism, service.spec.model.max_model_len
    tensor, pipeline = asked.tensor or 1, asked.pipeline or 1
    # No image is needed on this machine.
    resolved = Resolved(service=service, image="", tensor=tensor, pipeline=pipeline, max_model_len=length)
    return {"ui": True, **_document(resolved, host=host, port=port, admin_port=admin_port)}


def _draft_in_pods(model: Model) -> dict[str, JsonValue]:
    """The place of the draft model in a pod."""
    return {} if model.draft is None else {"draft_model": engine_draft(model, model.draft)}


def _managed_adapters(resolved: Resolved) -> dict[str, JsonValue]:
    """The adapters with which an engine in a pod starts; the operator may change them while the engine serves."""
    model = resolved.service.spec.model
    if model.adapters is None:
        return {}
    paths = adapter_paths(model, dict(resolved.adapter_commits))
    return {"managed_adapters": True, "adapters": [f"{name}={path}" for name, path in paths.items()]}


def _document(resolved: Resolved, *, host: str, port: int, admin_port: int) -> dict[str, JsonValue]:
    service = resolved.service
    model, recovery = service.spec.model, service.spec.recovery
    document: dict[str, JsonValue | None] = {
        "version": "v1",
        "model": model.source,
        "revision": resolved.commit or model.revision,
        "served_model_name": service.served_name,
        "dtype": model.dtype,
        "max_model_len": resolved.max_model_len,
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
        # An adapter in a claim is at another path in a pod, see `pod_engine_config`.
        "adapters": [f"{each.name}={each.path}" for each in model.adapters] if model.adapters else None,
        **service.spec.engine.args.model_dump(mode="json"),
    }
    if (draft := model.draft) is not None:
        commit = resolved.draft.commit if resolved.draft is not None else None
        document["speculation"] = "draft"
        document["draft_model"] = draft.source
        document["draft_revision"] = commit or draft.revision
        document["draft_quantization"] = draft.quantization
    return {name: value for name, value in document.items() if value is not None}
