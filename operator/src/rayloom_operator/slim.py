"""What the operator keeps of the objects that it watches: what it reads of them, in new small documents.

The rest, such as pod templates and environments, would be most of its memory. Names of fields are those of this module,
so that each is in memory once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rayloom_operator.names import USER_VOLUMES, Manifest

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
_OWNER = ("kind", "name", "uid")
_POD_STATUS = ("phase", "reason", "message", "podIP")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER = ("name", "image", "ready", "state", "lastState", "restartCount")
_CONTAINERS = ("initContainerStatuses", "containerStatuses")


def pod(found: Manifest) -> Manifest:
    """Of a Pod, what `observed.pod` and the observer read."""
    spec, status = found["spec"], found.get("status", {})
    volumes = [{"name": each["name"]} for each in spec.get("volumes", ()) if each["name"] in USER_VOLUMES]
    # The scheduler may put it back on such a node.
    stays = {"staysWhenCordoned": True} if any(map(_admits_cordoned, spec.get("tolerations") or ())) else {}
    containers = {each: [_part(one, _CONTAINER) for one in status.get(each) or ()] for each in _CONTAINERS}
    return {
        "metadata": _metadata(found),
        "spec": _part(spec, ("nodeName",)) | {"volumes": volumes} | stays,
        "status": _part(status, _POD_STATUS) | containers | _conditions(found),
    }


def node_of(found: Manifest) -> str:
    """Of a Pod, the node; empty while it has none."""
    return sys.intern(found["spec"].get("nodeName", ""))


def cluster(found: Manifest) -> Manifest:
    """Of a RayCluster, who owns it and what KubeRay says of it."""
    return {"metadata": _metadata(found), "status": _conditions(found)}


def job(found: Manifest) -> Manifest:
    """Of a Job, whether it is over."""
    return cluster(found)


def _admits_cordoned(toleration: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", "NoSchedule"):
        return False
    is_of_all = toleration.get("operator") == "Exists" and not toleration.get("key")
    return is_of_all or toleration.get("key") == "node.kubernetes.io/unschedulable"


def _metadata(found: Manifest) -> Manifest:
    meta = found["metadata"]
    return _part(meta, _META) | {
        "labels": {sys.intern(name): text for name, text in meta.get("labels", {}).items()},
        "ownerReferences": [_part(each, _OWNER) for each in meta.get("ownerReferences", ())],
    }


def _conditions(found: Manifest) -> Manifest:
    return {"conditions": [_part(each, _CONDITION) for each in found.get("status", {}).get("conditions") or ()]}


def _part(source: Mapping[str, Any], fields: tuple[str, ...]) -> Manifest:
    return {name: source[name] for name in fields if name in source}
