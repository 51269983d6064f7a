"""Decides who owns an existing object whose name the operator needs. Pure.

Object names are derived from the names of LLMServices and LLMGateways, so somebody else's object may have such a name.
The operator never changes or deletes somebody else's object.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from rayloom_operator.names import LLMGATEWAY_LABEL, MANAGED_BY_LABEL, SERVICE_LABEL, Manifest


class Whose(Enum):
    OURS = "created for this LLMService or LLMGateway"
    LEFT = "created for a deleted owner of the same kind and name"
    UNOWNED = "has the operator's labels and no owner, as after a restored backup"
    THEIRS = "created by another user or program"


def is_owned(meta: Manifest, uid: str) -> bool:
    """True if the object with this metadata has an owner with this uid, and so is deleted with that owner."""
    return any(owner["uid"] == uid for owner in meta.get("ownerReferences", ()))


def owner_uid(meta: Manifest) -> str:
    """Returns the uid of the first owner of the object with this metadata; empty without an owner."""
    return next((owner["uid"] for owner in meta.get("ownerReferences", ())), "")


def whose(found: Manifest, wanted: Manifest) -> Whose:
    """Returns who owns `found`, an existing object with the name of `wanted`."""
    meta, (owner,) = found["metadata"], wanted["metadata"]["ownerReferences"]
    if is_owned(meta, owner["uid"]):
        return Whose.OURS
    owners = meta.get("ownerReferences", ())
    if any((each.get("kind"), each.get("name")) == (owner["kind"], owner["name"]) for each in owners):
        return Whose.LEFT
    return Whose.UNOWNED if not owners and _marks(meta) == _marks(wanted["metadata"]) else Whose.THEIRS


def _marks(meta: Manifest) -> tuple[Any, ...]:
    labels = meta.get("labels") or {}
    return tuple(labels.get(name) for name in (MANAGED_BY_LABEL, SERVICE_LABEL, LLMGATEWAY_LABEL))
