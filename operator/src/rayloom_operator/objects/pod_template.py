"""Merges `spec.podTemplate` into the pods that the operator builds, and then restores reserved settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayloom_operator import names
from rayloom_operator.api.base import number_of
from rayloom_operator.api.pod_template.reserved_env import RESERVED_NAMES
from rayloom_operator.api.pod_template.reserved_parts import OWN_CONTAINERS
from rayloom_operator.api.pod_template.template import HeadTemplate, WorkerTemplate
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.pod_merge import merged
from rayloom_operator.resolve.resolved import Hub

# Value of HF_ENDPOINT in a container with the hub's token, so that no ConfigMap in `envFrom` redirects the token.
_HUB = "https://huggingface.co"
_HOSTNAME = "kubernetes.io/hostname"
# Default security context of containers that the template adds. With allowed privileges, the template may override it.
_OTHERS_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_SYS_ADMIN = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN"})
# Reserved variables that `_with_guards` does not set to an empty value: Ray would use an empty RAY_REDIS_ADDRESS as an
# address. So `envFrom` can set RAY_REDIS_ADDRESS; an engine for which it is set does not start.
_NEVER_EMPTY = frozenset({"RAY_REDIS_ADDRESS"})
# KubeRay always sets these variables in the first container of a pod.
_SET_BY_KUBERAY = frozenset({"FQ_RAY_IP", "KUBERAY_GEN_RAY_START_CMD", "RAY_ADDRESS", "RAY_IP", "RAY_PORT"})
# The only fields of the head's template that the inspection pod gets. This pod needs no host network and no
# accelerator.
_INSPECTION_FIELDS = (
    *("nodeSelector", "affinity", "tolerations", "priorityClassName", "schedulerName", "imagePullSecrets"),
    *("dnsPolicy", "dnsConfig", "hostAliases", "securityContext"),
)
# The limits that the inspection's container gets from the template's engine container: a namespace with a quota on such
# a limit refuses pods without it. The limit of memory is the operator's.
_INSPECTION_LIMITS = ("cpu", "ephemeral-storage")
# The inspection pod mounts only volumes of these kinds, and no claims. A claim with WaitForFirstConsumer would be bound
# to the node of this small pod.
_OWN_KINDS = frozenset({"configMap", "downwardAPI", "emptyDir", "projected", "secret"})


def with_template(service: LLMService, template: HeadTemplate | WorkerTemplate, built: Manifest, hub: Hub) -> Manifest:
    """Returns the operator's pod template `built` with the user's `template` merged over it."""
    patch = document_of(template)
    if not patch:
        return built
    found = merged(built, patch)
    spec = found["spec"]
    spec = spec | {"containers": [_kept(service, each, hub) for each in spec["containers"]]}
    if "initContainers" in spec:
        spec["initContainers"] = [_kept(service, each, hub) for each in spec["initContainers"]]
    if "topologySpreadConstraints" in spec:
        spec["topologySpreadConstraints"] = [_without_repeated_keys(each) for each in spec["topologySpreadConstraints"]]
    if spec.get("hostNetwork"):
        spec = _alone_on_its_node(spec)
        labels = {**found["metadata"]["labels"], names.HOST_NETWORK_LABEL: "true"}
        found["metadata"] = found["metadata"] | {"labels": labels}
    return found | {"spec": spec}


def document_of(template: HeadTemplate | WorkerTemplate) -> Manifest:
    """Returns a user's template as a document of Kubernetes, with only the fields that the user gave."""
    found = template.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {name: part for name, part in found.items() if part}


def with_inspection_template(service: LLMService, built: Manifest, hub: Hub) -> Manifest:
    """Returns the spec of the inspection pod, with those fields of the head's template that apply to an inspection.

    The pod's container gets variables, security context, mounts and some limits of the template's engine container.
    Labels and annotations are left out: they could cause the injection of a sidecar, which would keep the Job from
    completing.
    """
    given = document_of(service.spec.pod_template.head).get("spec", {})
    if not given:
        return built
    patch = {name: given[name] for name in _INSPECTION_FIELDS if name in given}
    volumes = [each for each in given.get("volumes", ()) if each.keys() & _OWN_KINDS]
    engine: Manifest = next(
        (each for each in given.get("containers", ()) if each["name"] == names.ENGINE_CONTAINER), {}
    )
    container: Manifest = {name: engine[name] for name in ("env", "envFrom", "securityContext") if name in engine}
    kept = {each["name"] for each in volumes}
    mounts = [each for each in engine.get("volumeMounts", ()) if each["name"] in kept]
    container |= {"name": names.INSPECT_CONTAINER, "volumeMounts": mounts}
    found = merged(built, patch | {"volumes": volumes, "containers": [container]})
    limits = engine.get("resources", {}).get("limits", {})
    containers = [_limited(_kept(service, each, hub, is_own=True), limits) for each in found["containers"]]
    return found | {"containers": containers}


def _limited(container: Manifest, limits: Mapping[str, str]) -> Manifest:
    """Returns the inspection's container with those of `limits` that apply to it, and without requests above them."""
    own = container["resources"]
    taken = {name: limits[name] for name in _INSPECTION_LIMITS if name in limits}
    # Kubernetes uses a limit as the request if no request is given.
    requests = {
        name: value
        for name, value in own["requests"].items()
        if name not in taken or number_of(value) <= number_of(taken[name])
    }
    return container | {"resources": own | {"requests": requests, "limits": own["limits"] | taken}}


def _kept(service: LLMService, container: Manifest, hub: Hub, *, is_own: bool | None = None) -> Manifest:
    """Returns the merged container with the security context completed and the reserved variables restored."""
    if is_own is None:
        is_own = container["name"] in OWN_CONTAINERS
    if not is_own:
        container = container | {"securityContext": merged(_OTHERS_SECURITY, container.get("securityContext", {}))}
    security = container["securityContext"]
    if security.get("privileged") or not _SYS_ADMIN.isdisjoint(security["capabilities"].get("add", ())):
        # Kubernetes refuses `privileged` and SYS_ADMIN without allowPrivilegeEscalation.
        container = container | {"securityContext": security | {"allowPrivilegeEscalation": True}}
    return _with_guards(service, container, hub) if is_own and "envFrom" in container else container


def _with_guards(service: LLMService, container: Manifest, hub: Hub) -> Manifest:
    """Returns the container with every reserved variable set in `env`, which overrides `envFrom`."""
    own = {each["name"] for each in container["env"]}
    unset = [name for name in RESERVED_NAMES if name not in own | _NEVER_EMPTY]
    if container["name"] in (names.HEAD_CONTAINER, names.WORKER_CONTAINER):
        unset = [name for name in unset if name not in _SET_BY_KUBERAY]
    guards: list[dict[str, Any]] = [{"name": name, "value": ""} for name in unset]
    is_guarded = service.spec.model.token_secret_ref is not None and not hub.allows_own
    if is_guarded and "HF_ENDPOINT" not in own:
        guards.append({"name": "HF_ENDPOINT", "value": _HUB})
    return container | {"env": [*container["env"], *guards]}


def _without_repeated_keys(constraint: Manifest) -> Manifest:
    """Returns the constraint without labels in its selector that are also in its `matchLabelKeys`.

    Kubernetes refuses a key that is in both. A template that adds matchLabelKeys to the operator's own constraint may
    name a label of the operator's selector. The scheduler itself then adds the label with the pod's value.
    """
    keys, selector = constraint.get("matchLabelKeys", ()), constraint.get("labelSelector", {})
    labels = selector.get("matchLabels")
    if not keys or not isinstance(labels, dict):
        return constraint
    kept = {name: value for name, value in labels.items() if name not in keys}
    return constraint | {"labelSelector": selector | {"matchLabels": kept}}


def _alone_on_its_node(spec: Manifest) -> Manifest:
    """Adds an anti-affinity against all other host-network pods of engines, because these use the same node ports."""
    term = {
        "topologyKey": _HOSTNAME,
        "labelSelector": {"matchLabels": {names.HOST_NETWORK_LABEL: "true"}},
        "namespaceSelector": {},  # every namespace
    }
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = spec.get("affinity", {})
    against = affinity.get("podAntiAffinity", {})
    against = against | {rule: [*against.get(rule, ()), term]}
    return {"dnsPolicy": "ClusterFirstWithHostNet"} | spec | {"affinity": affinity | {"podAntiAffinity": against}}
