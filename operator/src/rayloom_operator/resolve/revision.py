"""The revision of a service: a hash of everything for which a running engine must be recreated.

It covers the spec and its resolved inputs, never the built objects: another version of the operator rolls nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from rayloom_operator.resolve.resolved import Resolved


def revision(resolved: Resolved) -> str:
    """8 hex digits.

    Settings that are left out do not count, so a field that a later version adds changes no revision.
    """
    # The number of engines changes none of them, and neither do the settings of drains, recovery and rollouts: the
    # operator follows those of the current spec, and a change of them is no reason to end a stream. The image counts as
    # it was resolved; its pull policy does not count.
    service = resolved.service
    spec = service.spec.model_dump(
        mode="json",
        exclude={
            "model": {"revision", "served_name", "max_model_len"},
            "replicas": True,
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
    # The computed parallelism counts by its result, so pinning the numbers that run rolls nothing.
    shape = {"tensor": resolved.tensor, "pipeline": resolved.pipeline, "stages_per_pod": resolved.stages_per_pod}
    spec["parallelism"] = {name: number for name, number in shape.items() if number != 1}
    if service.spec.accelerator is not None:
        spec["accelerator"] = service.spec.accelerator.resource
    elif service.spec.engine.args.device == "cuda":  # the other devices are chosen anyway
        spec["device"] = "cuda"
    if resolved.max_model_len is not None:
        spec["maxModelLen"] = resolved.max_model_len
    inputs = {"spec": _without_empty(spec), "servedName": service.served_name, "image": resolved.image}
    if commit := resolved.commit or service.spec.model.revision:
        inputs["commit"] = commit
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]


def with_kept_image(resolved: Resolved, kept: str, current: str) -> Resolved:
    """Returns `resolved` with the image `kept`, where that alone makes it the revision `current`; else `resolved`.

    Another default image of the operator changes no service that runs; it counts once the spec changes otherwise.
    """
    if kept in ("", resolved.image) or resolved.service.spec.engine.image is not None:
        return resolved
    same = replace(resolved, image=kept)
    return same if revision(same) == current else resolved


def _without_empty(part: dict[str, Any]) -> dict[str, Any]:
    """`part` without maps that are empty, or hold only empty maps: they count as left out."""
    pruned = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in part.items()}
    return {name: value for name, value in pruned.items() if value != {}}
