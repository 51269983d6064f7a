"""Decides who owns an existing object whose name the operator needs. Pure.

Names follow from those of LLMServices, so an object of somebody else's may have one. It is neither changed nor deleted.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from rayloom_operator.names import SERVICE_LABEL, Manifest


class Whose(Enum):
    OURS = "made for this LLMService"
    LEFT = "made for an LLMService of this name that was deleted"
    UNOWNED = "with our labels and no owner, as a backup leaves it that was restored"
    THEIRS = "somebody else's"


def is_owned(meta: Manifest, uid: str) -> bool:
    """Whether an object with this metadata goes when the one with `uid` goes."""
    return any(owner["uid"] == uid for owner in meta.get("ownerReferences", ()))


def whose(found: Manifest, wanted: Manifest) -> Whose:
    """Who owns `found`, an object that has the name of `wanted`."""
    meta, (owner,) = found["metadata"], wanted["metadata"]["ownerReferences"]
    if is_owned(meta, owner["uid"]):
        return Whose.OURS
    owners = meta.get("ownerReferences", ())
    if any((each.get("kind"), each.get("name")) == (owner["kind"], owner["name"]) for each in owners):
        return Whose.LEFT
    return Whose.UNOWNED if not owners and _marks(meta) == _marks(wanted["metadata"]) else Whose.THEIRS


def _marks(meta: Manifest) -> tuple[Any, Any]:
    labels = meta.get("labels") or {}
    return labels.get("app.kubernetes.io/managed-by"), labels.get(SERVICE_LABEL)
