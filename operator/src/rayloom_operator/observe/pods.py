"""Reads one Pod document: the pod's state and its fault. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from rayloom_operator.api.pod_template.reserved_parts import OWN_CONTAINERS, OWN_INIT_CONTAINERS, WORKER_CONTAINERS
from rayloom_operator.api.status import Reason
from rayloom_operator.names import (
    ENGINE_CONTAINER,
    GATEWAY_CONTAINER,
    GATEWAY_LABEL,
    INSPECT_CONTAINER,
    LLMGATEWAY_LABEL,
    MODEL_VOLUME,
    MODELS_LABEL,
    NODE_TYPE_LABEL,
    ROUTE_LABEL,
    USER_VOLUMES,
    Manifest,
)
from rayloom_operator.objects.ownership import owner_uid
from rayloom_operator.observe.observed import MAX_MESSAGE, Pod, Verdict
from rayloom_operator.texts import head, plain, tail
from rayloom_operator.times import moment

# Reasons that the kubelet gives if it cannot start a container.
_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CREATE_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
# The kubelet gives these reasons while it prepares a container. It gives the same reasons if a volume cannot be
# mounted.
_MOUNT_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
# Exit codes of the engine.
_EXIT_CONFIG = 78  # exit code: settings or model cannot be used, so a restart would not help
_EXIT_GIVEN_UP = 70  # one of the engine's processes kept dying
# The kubelet restarts a container at once, and then at growing intervals. After this many exits the pod itself may be
# the cause, so another restart in the same pod is not expected to help.
_MAX_ENDS = 3
# The engine's last message is a text for people. The first of these phrases that the message contains tells why the
# model cannot be used.
HUB_SENTENCES = {
    "the hub cannot be reached": Reason.HUB_UNREACHABLE,
    "accept its terms": Reason.MODEL_GATED,
    "the hub refuses": Reason.MODEL_NO_ACCESS,
}
MISSING_MODEL = re.compile(r"no model|no such|there is no|does not exist", re.IGNORECASE)
_MORE_DISK = (
    "The pod fetches or converts the model on its node's disk: give spec.model.cache a place, add nodes with larger "
    "disks, or set spec.engine.resources.requests.ephemeral-storage."
)


def pod(document: Manifest, mount_failure: str = "") -> Pod:
    """Returns the pod in a Pod document. `mount_failure`: the kubelet's message about the pod's volumes, or empty."""
    meta, spec, status = document["metadata"], document["spec"], document.get("status", {})
    labels = meta.get("labels", {})
    conditions = _conditions(document)
    containers = status.get("containerStatuses", ())
    engine: Manifest = next((each for each in containers if each["name"] == ENGINE_CONTAINER), {})
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        is_head=labels.get(NODE_TYPE_LABEL) == "head",
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_engine_ready=engine.get("ready", False),
        is_routed=labels.get(ROUTE_LABEL) == "true",
        is_mounting=_is_mounting(status),
        running_since=_running_since(status),
        is_exhausted=any(_is_exhausted(each) for each in containers),
        num_engine_starts=engine.get("restartCount", 0),
        owner_uid=owner_uid(meta),
        stays_when_cordoned=spec.get("staysWhenCordoned", False),
        grace_s=meta.get("deletionGracePeriodSeconds", 0) if "deletionTimestamp" in meta else None,
        fault=_fault(document, conditions, mount_failure),
        models_label=labels.get(MODELS_LABEL, ""),
        was_starved=any(_last_end(each).get("reason") == "OOMKilled" for each in _all_containers(status)),
    )


def staying_pods(documents: Iterable[Manifest]) -> tuple[Pod, ...]:
    """Returns the pods in these Pod documents, without terminating pods."""
    return tuple(pod(each) for each in documents if "deletionTimestamp" not in each["metadata"])


def _conditions(document: Manifest) -> dict[str, Manifest]:
    return {each["type"]: each for each in document.get("status", {}).get("conditions", ())}


def _all_containers(status: Manifest) -> Iterator[Manifest]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _is_mounting(status: Manifest) -> bool:
    reasons = [each["state"].get("waiting", {}).get("reason") for each in _all_containers(status)]
    return bool(reasons) and all(reason in _MOUNT_REASONS for reason in reasons)


def _running_since(status: Manifest) -> datetime | None:
    """Returns the start of the container that started last; None while any container does not run."""
    states = [each["state"] for each in status.get("containerStatuses", ())]
    if not states or not all("running" in state for state in states):
        return None
    return moment(max(state["running"].get("startedAt", "") for state in states))


def _fault(document: Manifest, conditions: Mapping[str, Manifest], mount_failure: str) -> Verdict | None:
    """Returns the pod's first fault. The checks are in the order of a pod's life, from scheduling to its containers."""
    name, status = document["metadata"]["name"], document.get("status", {})
    labels = document["metadata"].get("labels", {})
    fault = (
        _unschedulable(name, conditions.get("PodScheduled", {}), _room(labels))
        or _unmountable(name, document["spec"], mount_failure)
        or _failed(name, status)
    )
    if fault is not None:
        return fault
    for container in _all_containers(status):
        fault = _container_fault(name, container, _settings_of_gateways(labels))
        if fault is not None:
            return fault
    return None


def _settings_of_gateways(labels: Mapping[str, str]) -> str:
    """Returns the name of the part of the spec that has `image` and `resources` of a gateway pod with these labels."""
    return "spec" if LLMGATEWAY_LABEL in labels else "spec.gateway"


def _room(labels: Mapping[str, str]) -> str:
    """Returns a sentence: what to do if no node has room for a pod with these labels."""
    is_gateway = LLMGATEWAY_LABEL in labels or GATEWAY_LABEL in labels
    part = _settings_of_gateways(labels) if is_gateway else "spec.engine"
    return f"Add nodes, or lower {part}.resources."


def _unschedulable(name: str, scheduled: Manifest, cure: str) -> Verdict | None:
    """Returns a verdict if no node has room for the pod. `cure`: a sentence with the remedy."""
    if (scheduled.get("status"), scheduled.get("reason")) != ("False", "Unschedulable"):
        return None
    cause = _head(scheduled.get("message", ""))
    if "persistentvolumeclaim" in cause:
        cure = "Make the claim, or change spec.model."
    elif "Insufficient ephemeral-storage" in cause:
        cure = _MORE_DISK
    return Verdict(reason=Reason.UNSCHEDULABLE, message=f"pod {name} finds no node: {cause} {cure}")


def _unmountable(name: str, spec: Manifest, mount_failure: str) -> Verdict | None:
    if not mount_failure:
        return None
    cause = _head(mount_failure)
    if any(f'"{volume}"' in mount_failure for volume in _volumes_beside_the_model(spec)):
        return Verdict(
            reason=Reason.CONTAINER_FAILED,
            message=f"pod {name} cannot mount a volume that the spec names: {cause}. Make it, or change the spec.",
        )
    return Verdict(
        reason=Reason.MODEL_NOT_FOUND,
        message=f"pod {name} cannot mount the model: {cause}. Put the model at this path on every node, or change "
        "spec.model.source.",
    )


def _volumes_beside_the_model(spec: Manifest) -> set[str]:
    return {*USER_VOLUMES, *(volume["name"] for volume in spec.get("volumes", ()))} - {MODEL_VOLUME}


def _failed(name: str, status: Manifest) -> Verdict | None:
    if status.get("phase") != "Failed":
        return None
    cause = f"{status.get('reason', 'Failed')}: {_head(status.get('message', ''))}"
    return Verdict(reason=Reason.CONTAINER_FAILED, message=f"pod {name} has failed ({cause})")


def _last_end(container: Manifest) -> Manifest:
    """Returns the last termination of the container; empty if it never ended."""
    return container["state"].get("terminated") or container.get("lastState", {}).get("terminated") or {}


def _is_exhausted(container: Manifest) -> bool:
    """Returns whether the container has ended, and restarts in the same pod are not expected to help."""
    ended = _last_end(container)
    if "running" in container["state"] or not ended:
        return False
    if container["name"] == ENGINE_CONTAINER and ended["exitCode"] == _EXIT_GIVEN_UP:
        return True
    if container["name"] == ENGINE_CONTAINER and ended["exitCode"] == _EXIT_CONFIG:
        return False
    # The kubelet backs off only for a container that has ended more than once within minutes.
    is_backing_off = container["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
    return is_backing_off and bool(container.get("restartCount", 0) >= _MAX_ENDS)


def _container_fault(pod_name: str, container: Manifest, gateways: str) -> Verdict | None:
    """Returns why the container does not run. `gateways`: the part of the spec for gateway pods."""
    return _waiting_fault(pod_name, container, gateways) or _end_fault(pod_name, container, gateways)


def _waiting_fault(pod_name: str, container: Manifest, gateways: str) -> Verdict | None:
    """Returns why the kubelet cannot start the container."""
    waiting = container["state"].get("waiting", {})
    reason, message = waiting.get("reason", ""), _head(waiting.get("message", ""))
    if reason in _IMAGE_REASONS:
        return Verdict(
            reason=Reason.IMAGE_PULL_FAILED,
            message=f"image {container['image']} cannot be pulled ({reason}: {message}). "
            f"Check {_image_field(container, gateways)} and whether the nodes can reach its registry.",
        )
    if reason in _CREATE_REASONS:
        where = f"container {container['name']} of pod {pod_name}"
        return Verdict(reason=Reason.CONTAINER_FAILED, message=f"{where} cannot start: {reason}: {message}")
    return None


def _end_fault(pod_name: str, container: Manifest, gateways: str) -> Verdict | None:
    """Returns why the container ended; None once it is ready again."""
    ended = _last_end(container)
    if not ended or container.get("ready", False) or ended["exitCode"] == 0:
        return None
    is_engine = container["name"] == ENGINE_CONTAINER
    where = f"container {container['name']} of pod {pod_name}"
    code, words = ended["exitCode"], _tail(ended.get("message", ""))
    if is_engine and code == _EXIT_CONFIG:
        return Verdict(
            reason=_model_fault(words), message=words or f"{where} cannot serve this model; its log says why."
        )
    if is_engine and code == _EXIT_GIVEN_UP:
        return Verdict(reason=Reason.ENGINE_FAILED, message=f"The engine gave up: {words}")
    if "running" in container["state"]:
        return None  # The container was restarted, and may work now.
    cause = f"{ended.get('reason', 'Error')}, exit code {code}"
    cure = f". Raise {_memory_field(container, gateways)}." if ended.get("reason") == "OOMKilled" else ""
    return Verdict(
        reason=Reason.ENGINE_FAILED if is_engine else Reason.CONTAINER_FAILED,
        message=f"{where} ended ({cause}): {words or 'it left no message; see its log'}{cure}",
    )


def _model_fault(words: str) -> Reason:
    """Returns the reason why a model cannot be used, according to `words`, the engine's last message."""
    for sentence, reason in HUB_SENTENCES.items():
        if sentence in words:
            return reason
    return Reason.MODEL_NOT_FOUND if MISSING_MODEL.search(words) else Reason.MODEL_UNUSABLE


def _memory_field(container: Manifest, gateways: str) -> str:
    if container["name"] == GATEWAY_CONTAINER:
        return f"{gateways}.resources.limits.memory"
    if container["name"] in (*WORKER_CONTAINERS, INSPECT_CONTAINER):
        return "spec.engine.resources.limits.memory"
    return f"resources.limits.memory of container {container['name']} in spec.podTemplate"


def _image_field(container: Manifest, gateways: str) -> str:
    if container["name"] == GATEWAY_CONTAINER:
        return f"{gateways}.image"
    is_ours = container["name"] in (*OWN_CONTAINERS, *OWN_INIT_CONTAINERS, INSPECT_CONTAINER)
    return "spec.engine.image" if is_ours else f"the image of container {container['name']} in spec.podTemplate"


def _head(text: str) -> str:
    return head(plain(text), MAX_MESSAGE)


def _tail(text: str) -> str:
    """Returns the end of a log, which tells more than its beginning."""
    return tail(plain(text), MAX_MESSAGE)
