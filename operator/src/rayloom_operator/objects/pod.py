"""Parts that all pods of a service share: user, security context, scheduling, and access to the model."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_operator import names
from rayloom_operator.api.model import Model
from rayloom_operator.api.model_source import SourcedModel
from rayloom_operator.api.mounted_folders import CACHE_FOLDER
from rayloom_operator.api.pod_template.container import covers
from rayloom_operator.api.pod_template.reserved_parts import DRAFT_FOLDER, DRAFT_VOLUME
from rayloom_operator.api.pods import LocalObject, Scheduling
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.adapter_volumes import adapter_places
from rayloom_operator.resolve.resolved import Hub

# The user of the engine's image. Both containers of the head pod run as this user, to which Ray's sockets belong.
_USER = 1000


def pod_basics(service: LLMService) -> Manifest:
    """The fields of a pod's spec that are the same for head, worker, inspection and gateway pods."""
    spec = service.spec
    return pod_fields(
        names.account_name(service.metadata.name),
        spec.scheduling,
        spec.engine.image_pull_secrets,
        node_loss_seconds=spec.recovery.node_loss_seconds,
        # With `podTemplate.user: Cluster` no user is set: OpenShift then assigns one from the namespace's range.
        has_user=spec.pod_template.user == "Operator",
    )


def pod_fields(
    account: str,
    scheduling: Scheduling,
    pull_secrets: Sequence[LocalObject],
    *,
    node_loss_seconds: int,
    has_user: bool = True,
) -> Manifest:
    """The fields of the spec of every pod that the operator builds. `account`: name of the pod's ServiceAccount."""
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": node_loss_seconds}
    tolerations = [{"key": f"node.kubernetes.io/{taint}", **toleration} for taint in ("not-ready", "unreachable")]
    given = (each.model_dump(by_alias=True, exclude_none=True) for each in scheduling.tolerations)
    user = {
        **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER),
        # It is slow to change the group of all files in a large claim. The change is needed only at the first mount.
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    pod: Manifest = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **(user if has_user else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [*tolerations, *given],
    }
    optional = {
        "imagePullSecrets": [{"name": each.name} for each in pull_secrets],
        "nodeSelector": scheduling.node_selector,
        "priorityClassName": scheduling.priority_class_name,
    }
    return pod | {name: value for name, value in optional.items() if value}


def container_basics(service: LLMService, name: str, image: str) -> Manifest:
    """The fields that are the same in every container of a service."""
    return container_fields(name, image, service.spec.engine.image_pull_policy)


def container_fields(name: str, image: str, pull_policy: str = "IfNotPresent") -> Manifest:
    """The fields that are the same in every container that the operator builds."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The engine writes a termination message. Ray writes no termination message, so the kubelet takes the last
        # lines of Ray's log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def environment(service: LLMService, own: dict[str, Manifest]) -> list[Manifest]:
    """Returns the operator's `own` variables and those of spec.engine.env.

    A variable of the spec replaces an own variable of that name, because the API server would refuse duplicate names.
    """
    found = own | {variable.name: {"value": variable.value} for variable in service.spec.engine.env}
    return [{"name": name, **source} for name, source in found.items()]


def model_variables(service: LLMService, hub: Hub, *, serves: bool = True) -> dict[str, Manifest]:
    """Variables of a container that reads the model, by name.

    `serves`: the container also reads the LoRA adapters, and mounts the cache of files from the hub.
    """
    model = service.spec.model
    # Each pod converts the .gguf file, into /tmp because the image's cache folder is read-only.
    found: dict[str, Manifest] = {"RAYLOOM_CACHE": {"value": "/tmp/rayloom"}} if model.has_gguf else {}
    if not _reads_hub(model, serves):
        return found
    if hub.endpoint:
        found["HF_ENDPOINT"] = {"value": hub.endpoint}
    if hub.ca_config_map:
        found["SSL_CERT_FILE"] = {"value": f"{names.CA_FOLDER}/{names.CA_KEY}"}
    if model.token_secret_ref is not None:
        found["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": model.token_secret_ref.model_dump()}}
    if serves and model.cache is not None:
        found["HF_HUB_CACHE"] = {"value": f"{CACHE_FOLDER}/hub"}
    return found


def api_keys_volumes(service: LLMService) -> list[Manifest]:
    """Returns the volume with the API keys, or an empty list without spec.auth."""
    if service.spec.auth is None:
        return []
    secret = service.spec.auth.api_key_secret_ref
    items = [{"key": secret.key, "path": names.KEYS_FILE}]
    return [{"name": names.KEYS_VOLUME, "secret": {"secretName": secret.name, "items": items}}]


def model_volumes(service: LLMService, hub: Hub, *, serves: bool = True) -> list[Manifest]:
    """Volumes from which a pod reads the model.

    `serves`: the pod also mounts the cache of models from the hub, and the LoRA adapters.
    """
    return [volume for volume, _ in _model_places(service, hub, serves)]


def model_mounts(service: LLMService, hub: Hub, *, serves: bool = True) -> list[Manifest]:
    """The mounts of `model_volumes`."""
    return [{"name": volume["name"], **mount} for volume, mount in _model_places(service, hub, serves)]


def _reads_hub(model: Model, serves: bool) -> bool:
    """Returns whether a container needs access to the hub. The pod of an inspection reads no adapters."""
    return model.uses_hub if serves else model.inspects_hub


def _model_places(service: LLMService, hub: Hub, serves: bool) -> list[tuple[Manifest, Manifest]]:
    model = service.spec.model
    places: list[tuple[Manifest, Manifest]] = []
    adapters = adapter_places(model) if serves else []
    if model.source_kind == "pvc":
        places.append(_claim_place(names.MODEL_VOLUME, model, names.CLAIM_FOLDER))
    if model.host_path is not None:
        places.append(_host_place(names.MODEL_VOLUME, model, model.host_path))
    draft = model.draft
    if draft is not None and draft.claim not in (None, model.claim):
        places.append(_claim_place(DRAFT_VOLUME, draft, DRAFT_FOLDER))
    if draft is not None and (path := draft.host_path) is not None:
        # The draft model may be in a folder of the nodes that the pod mounts for the model or for an adapter. A mounted
        # claim does not have the files of the nodes.
        mounted = [mount["mountPath"] for volume, mount in (*places, *adapters) if "hostPath" in volume]
        if not any(covers(folder, path) for folder in mounted):
            places.append(_host_place(DRAFT_VOLUME, draft, path))
    if _reads_hub(model, serves) and hub.ca_config_map:
        volume = {"name": names.CA_VOLUME, "configMap": {"name": hub.ca_config_map}}
        places.append((volume, {"mountPath": names.CA_FOLDER, "readOnly": True}))
    if serves and model.cache is not None:
        cache = model.cache
        kind: Manifest = {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}
        if cache.host_path is not None:
            # Type Directory requires an existing folder. A folder that the kubelet created would belong to root, and
            # the pods could not write to it.
            kind = {"hostPath": {"path": cache.host_path, "type": "Directory"}}
        places.append(({"name": names.CACHE_VOLUME, **kind}, {"mountPath": CACHE_FOLDER}))
    return places + adapters


def _claim_place(name: str, model: SourcedModel, folder: str) -> tuple[Manifest, Manifest]:
    """Returns the volume of a model's claim, and its mount at `folder`."""
    volume = {"name": name, "persistentVolumeClaim": {"claimName": model.claim}}
    return volume, {"mountPath": folder, "readOnly": True}


def _host_place(name: str, model: SourcedModel, path: str) -> tuple[Manifest, Manifest]:
    """Returns the volume of a model on the nodes, and its mount.

    The path in the pod is the path on the node, so the engine's config is the same with and without a cluster.
    """
    volume = {"name": name, "hostPath": {"path": path, "type": "File" if model.is_gguf else "Directory"}}
    return volume, {"mountPath": path, "readOnly": True}
