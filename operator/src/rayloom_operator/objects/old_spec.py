"""Stores the spec of each revision in use as a ControllerRevision, to recreate engine replicas of that revision.

A rollback needs the previous spec, which the LLMService no longer has. Kubernetes stores earlier templates of
StatefulSets in the same way.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import API_VERSION, KIND, parse
from rayloom_operator.api.status import InspectedModel, stored_model
from rayloom_operator.errors import SpecError
from rayloom_operator.names import Manifest, metadata, object_path
from rayloom_operator.resolve.resolved import Hub, Resolved, resolve

API_OF_OLD_SPECS = "apps/v1"
KIND_OF_OLD_SPECS = "ControllerRevision"


def old_spec_name(service: str, revision: str) -> str:
    return f"{service}-{revision}"


def old_spec_path(namespace: str, service: str, revision: str) -> str:
    return object_path(API_OF_OLD_SPECS, KIND_OF_OLD_SPECS, namespace, old_spec_name(service, revision))


def old_spec(resolved: Resolved, revision: str, model: InspectedModel | None) -> Manifest:
    """The ControllerRevision of `revision`. `model`: the inspection's result; None for a built-in model."""
    service = resolved.service
    data: dict[str, Any] = {
        "spec": service.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True),
        "image": resolved.image,
    }
    if model is not None:
        data["model"] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    if resolved.sizing is not None:
        # Alternatives and advice are left out, because only the chosen candidate is needed.
        data["sizing"] = resolved.sizing.model_dump(
            mode="json", by_alias=True, exclude={"alternatives", "advice"}, exclude_none=True
        )
    return {
        "apiVersion": API_OF_OLD_SPECS,
        "kind": KIND_OF_OLD_SPECS,
        "metadata": metadata(service, old_spec_name(service.metadata.name, revision)),
        "data": data,
        "revision": 1,  # The API requires a number. The operator's own revisions are hashes in names.
    }


def resolved_of(found: Manifest, service: Manifest, hub: Hub) -> Resolved | None:
    """Returns the resolved spec that is stored in `found`, a ControllerRevision of the LLMService `service`.

    Returns None if the stored spec cannot be read, for example because another version of the operator wrote it.
    """
    meta = {name: service["metadata"].get(name) for name in ("name", "namespace", "uid", "creationTimestamp")}
    try:
        was = parse({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": found["data"]["spec"]})
        facts: ModelFacts | None = builtin_facts(was.spec.model) or stored_model(found["data"])
        return resolve(was, found["data"]["image"], facts, found["data"], hub)
    except (SpecError, ValidationError, KeyError):
        return None
