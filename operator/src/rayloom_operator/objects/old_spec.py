"""Builds and reads a ControllerRevision for each revision in use, from which its engine replicas can be recreated.

A rollback needs the previous spec, which the LLMService no longer holds. Kubernetes keeps the templates of StatefulSets
the same way.
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
    """The ControllerRevision of `revision`; `model` is the inspection's result, None for a built-in model."""
    service = resolved.service
    data: dict[str, Any] = {
        "spec": service.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True),
        "image": resolved.image,
    }
    if model is not None:
        data["model"] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    if resolved.sizing is not None:
        # The choice is stored without its alternatives.
        data["sizing"] = resolved.sizing.model_dump(
            mode="json", by_alias=True, exclude={"alternatives", "advice"}, exclude_none=True
        )
    return {
        "apiVersion": API_OF_OLD_SPECS,
        "kind": KIND_OF_OLD_SPECS,
        "metadata": metadata(service, old_spec_name(service.metadata.name, revision)),
        "data": data,
        "revision": 1,  # required by the API; the operator's revisions are hashes in names
    }


def resolved_of(found: Manifest, service: Manifest, hub: Hub) -> Resolved | None:
    """The resolved spec stored in `found`; None where another version of the operator wrote a document that this one
    cannot read. `service` is the LLMService's document."""
    meta = {name: service["metadata"].get(name) for name in ("name", "namespace", "uid", "creationTimestamp")}
    try:
        was = parse({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": found["data"]["spec"]})
        facts: ModelFacts | None = builtin_facts(was.spec.model) or stored_model(found["data"])
        return resolve(was, found["data"]["image"], facts, found["data"], hub)
    except (SpecError, ValidationError, KeyError):
        return None
