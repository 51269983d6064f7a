"""All that is there of a service, to compare one story's end with another's."""

from __future__ import annotations

import json
import re
from typing import Any

from real_api_server.world import World

_OF_THIS_RUN = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace", "generation"}
    | {"clusterIP", "clusterIPs", "lastTransitionTime", "nodes", "lastUpdateTime", "stateTransitionTimes", "head"}
    | {"time", "stepTime", "progressTime", "rollTime", "heldTime", "shortTime"}
)

_NOTHING = "nothing"


def end_state(world: World, namespace: str, name: str) -> object:
    """All objects of the service and its status, without what differs from one time to the next."""
    status = world.services[(namespace, name)]["status"]
    objects: dict[str, Any] = {"status": status}
    for path, each in world.objects(namespace, name).items():
        if path.startswith(("RayCluster/", "PodDisruptionBudget/")):
            each = each | {"status": {}}  # somebody else's, and it may be behind
        if path.startswith("Secret/"):
            each = each | {"data": sorted(each["data"])}  # tokens hang on the service's uid
        objects[path] = each
    pods = world.pods(namespace, name)
    objects["pods"] = sorted((each["metadata"]["labels"] for each in pods), key=json.dumps)
    text = json.dumps(_plain(objects)).replace(name, "NAME")
    # Which number was free hangs on when the old engine went; and the names of pods are KubeRay's.
    text = re.sub(r"(NAME-[0-9a-f]{8})-\d+", r"\1-N", text)
    return json.loads(re.sub(r"-N-head-[a-z0-9]{5}\b", "-N-head", text))


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Where two such ends differ, a line each: a whole end is too long to be read in a failed test's output."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        pairs = ((key, found.get(key, _NOTHING), wanted.get(key, _NOTHING)) for key in sorted({*found, *wanted}))
        return [line for key, *pair in pairs for line in differences(*pair, f"{path}.{key}".lstrip("."))]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        numbered = enumerate(zip(found, wanted, strict=True))
        return [line for number, pair in numbered for line in differences(*pair, f"{path}[{number}]")]
    return [] if found == wanted else [f"{path}: {found!r} instead of {wanted!r}"]


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in sorted(found.items()) if key not in _OF_THIS_RUN}
    return [_plain(each) for each in found] if isinstance(found, list) else found
