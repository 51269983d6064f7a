"""The end state of a service, by which tests compare two runs."""

from __future__ import annotations

import json
import re
from typing import Any

from operator_processes.process import wait_until
from real_api_server.world import World

_OF_THIS_RUN = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace", "generation"}
    | {"clusterIP", "clusterIPs", "lastTransitionTime", "nodes", "lastUpdateTime", "stateTransitionTimes", "head"}
    | {
        "time",
        "startTime",
        "stepStartTime",
        "progressDeadlineStartTime",
        "evictionHoldStartTime",
        "noCapacityStartTime",
    }
)

_NOTHING = "nothing"


def end_state(world: World, namespace: str, name: str) -> object:
    """All objects of the service and its status, without fields that differ between runs."""
    status = world.services[(namespace, name)]["status"]
    objects: dict[str, Any] = {"status": status}
    for path, each in world.objects(namespace, name).items():
        if path.startswith(("RayCluster/", "PodDisruptionBudget/")):
            each = each | {"status": {}}  # other controllers write the status later
        if path.startswith("Secret/"):
            each = each | {"data": sorted(each["data"])}  # tokens depend on the service's uid
        objects[path] = each
    pods = world.pods(namespace, name)
    objects["pods"] = sorted((each["metadata"]["labels"] for each in pods), key=json.dumps)
    text = json.dumps(_plain(objects)).replace(name, "NAME")
    # The number in an engine replica's name depends on the time at which the old replica ended. KubeRay adds random
    # suffixes to names of pods.
    text = re.sub(r"(NAME-[0-9a-f]{8})-\d+", r"\1-N", text)
    return json.loads(re.sub(r"-N-head-[a-z0-9]{5}\b", "-N-head", text))


def wait_same_end(world: World, namespace: str, name: str, other: str) -> None:
    """Returns once two services have the same end state.

    A serving service may still change: controllers delete and create objects of their own, and the operator writes a
    changed message with a delay of up to five seconds.
    """

    def found() -> list[str]:
        return differences(end_state(world, namespace, name), end_state(world, namespace, other))

    wait_until(lambda: not found(), f"{name} to be like {other}", story=lambda: "\n".join(found()), pause_s=0.3)


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """The differences of two end states, one a line, because whole end states are too long for a test's output."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            line
            for key in sorted({*found, *wanted})
            for line in differences(found.get(key, _NOTHING), wanted.get(key, _NOTHING), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [
            line
            for number, (one, other) in enumerate(zip(found, wanted, strict=True))
            for line in differences(one, other, f"{path}[{number}]")
        ]
    return [] if found == wanted else [f"{path}: {found!r} instead of {wanted!r}"]


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in sorted(found.items()) if key not in _OF_THIS_RUN}
    return [_plain(each) for each in found] if isinstance(found, list) else found
