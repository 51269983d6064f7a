"""The revision of a service: a hash of everything whose change requires new engines.

The hash covers the spec and its resolved inputs, but not the objects that the operator builds from them. So an upgrade
of the operator starts no rollout.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from rayloom_operator.api.adapters import volume_sources
from rayloom_operator.resolve.resolved import Resolved


def revision(resolved: Resolved) -> str:
    """Returns the revision: 8 hex digits.

    Fields with default values are not hashed. So a later version of the operator can add a field without changing
    revisions.
    """
    # `replicas` and the settings of autoscaling, gateways, drains, recovery and rollouts are excluded. These fields do
    # not change an engine, so a change of these fields need not interrupt streams. The operator reads them from the
    # current spec. The pull policy does not change an engine either. The other excluded fields are added below in their
    # resolved form.
    service = resolved.service
    spec = service.spec.model_dump(
        mode="json",
        exclude={
            "model": {
                **dict.fromkeys(("revision", "served_name", "max_model_len", "adapters"), True),
                "draft": {"revision"},
            },
            "replicas": True,
            "autoscaling": True,
            "gateway": True,
            "parallelism": True,
            "sizing": True,
            "accelerator": True,
            "drain_seconds": True,
            "recovery": True,
            "rollout": True,
            "engine": {"image": True, "image_pull_policy": True, "args": {"device"}},
        },
        exclude_defaults=True,
    )
    # The numbers of ranks are hashed, whether the operator computed them or the spec gives them. So a user who writes
    # the computed numbers into the spec starts no rollout.
    shape = {"tensor": resolved.tensor, "pipeline": resolved.pipeline, "stages_per_pod": resolved.stages_per_pod}
    spec["parallelism"] = {name: number for name, number in shape.items() if number != 1}
    if service.spec.accelerator is not None:
        spec["accelerator"] = service.spec.accelerator.resource
    elif service.spec.engine.args.device == "cuda":  # without an accelerator, auto means cpu, so only cuda is hashed
        spec["device"] = "cuda"
    if resolved.max_model_len is not None:
        spec["maxModelLen"] = resolved.max_model_len
    if service.spec.gateway is not None:
        # The engines of such a service have a port for gateways, whatever the number of gateways is.
        spec["hasGatewayPort"] = True
    model = service.spec.model
    if model.adapters is not None:
        # Engines load and unload adapters while they serve, but reserve memory and mount volumes for them at start.
        spec["adapterVolumes"] = volume_sources(model.adapters, model.claim, model.host_path)
        if model.uses_hub and model.source_kind != "hf":
            spec["adaptersFromHub"] = True  # pods get the hub's address and token at start
    if model.draft is not None:
        spec.get("engine", {}).get("args", {}).pop("speculation", None)  # a draft model implies the value draft
        commit_of_draft = resolved.draft.commit if resolved.draft is not None else None
        if commit_of_draft := commit_of_draft or model.draft.revision:
            spec["draftCommit"] = commit_of_draft
    inputs = {"spec": _without_empty(spec), "servedName": service.served_name, "image": resolved.image}
    if commit := resolved.commit or service.spec.model.revision:
        inputs["commit"] = commit
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]


def with_kept_image(resolved: Resolved, kept: str, current: str) -> Resolved:
    """Returns `resolved` with the image `kept` if that gives the revision `current`. If not, returns `resolved`.

    So a new default image of the operator changes a running service only once something else in the service's spec
    changes.
    """
    if kept in ("", resolved.image) or resolved.service.spec.engine.image is not None:
        return resolved
    same = replace(resolved, image=kept)
    return same if revision(same) == current else resolved


def _without_empty(part: dict[str, Any]) -> dict[str, Any]:
    """Returns `part` without maps that are empty or hold only empty maps: they mean the same as no map."""
    pruned = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in part.items()}
    return {name: value for name, value in pruned.items() if value != {}}
