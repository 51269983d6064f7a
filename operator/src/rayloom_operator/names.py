"""Names, labels and ports that several objects use, and the metadata that makes an LLMService their owner."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from rayloom_operator.api.mounted_folders import MODELS_FOLDER
from rayloom_operator.api.pod_template.reserved_parts import OWN_VOLUMES
from rayloom_operator.api.spec import API_VERSION, KIND, LLMService, Metadata

Manifest = dict[str, Any]
ServiceKey = tuple[str, str]  # (namespace, name) of an LLMService

API_GROUP, API_VERSION_NAME = API_VERSION.split("/")
API_PLURAL = "llmservices"
FIELD_MANAGER = "rayloom-operator"  # the operator's name in every write to the API server

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SERVICE_LABEL = "rayloom.dev/service"
GROUP_LABEL = "rayloom.dev/group"
REVISION_LABEL = "rayloom.dev/revision"
# The operator sets and removes this label on running pods. No pod template has it, so a new pod gets no requests yet.
ROUTE_LABEL = "rayloom.dev/route"
# This label is on gateway pods. Its value is the name of their LLMService.
GATEWAY_LABEL = "rayloom.dev/gateway"
# This label is on every object of an LLMGateway, including its pods. Its value is the LLMGateway's name.
LLMGATEWAY_LABEL = "rayloom.dev/llmgateway"
# The operator sets this label on gateway pods of an LLMGateway after a change of their models file. Its value is the
# hash of the file. When a pod changes, the kubelet updates the pod's files at once; without such a change, the update
# takes up to two minutes. No pod template has the label.
MODELS_LABEL = "rayloom.dev/models"
# This label is on Secrets whose content the operator renews. Other Secrets are never changed.
RENEWED_LABEL = "rayloom.dev/renewed"
# Label of pods with hostNetwork. Anti-affinity by this label keeps two such pods from running on the same node, where
# their ports would clash.
HOST_NETWORK_LABEL = "rayloom.dev/host-network"
# KubeRay sets these labels on each of its pods.
NODE_TYPE_LABEL = "ray.io/node-type"
CLUSTER_LABEL = "ray.io/cluster"

ENGINE_CONTAINER = "engine"
HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"
INSPECT_CONTAINER = "inspect"
GATEWAY_CONTAINER = "gateway"

API_PORT = 8000
ADMIN_PORT = 8001
RANK_PORT = 8002  # port of the engine's core, to which ranks connect
FRONT_PORT = 8003  # port of the engine's core, to which gateways connect
CONFIG_FOLDER = "/etc/rayloom"
CONFIG_KEY = "config.json"
TOKEN_KEY = "token"
FRONT_KEY = "key"  # name of the entry in the Secret that gateways and engines share
FRONT_KEY_FILE = f"{CONFIG_FOLDER}/gateway/{FRONT_KEY}"
ADMIN_TOKEN_FILE = f"{CONFIG_FOLDER}/admin/{TOKEN_KEY}"
MODEL_VOLUME = "model"
CLAIM_FOLDER = MODELS_FOLDER  # the mount path of the claim of a pvc:// model
CACHE_VOLUME = "model-cache"
KEYS_VOLUME = "api-keys"
KEYS_FOLDER = "/etc/rayloom-keys"
KEYS_FILE = "keys"
CA_VOLUME = "hub-ca"
CA_FOLDER = "/etc/rayloom-ca"
CA_KEY = "ca.crt"
# The volumes in OWN_VOLUMES whose source the user provides. A pod template may add further volumes of the user.
USER_VOLUMES = (MODEL_VOLUME, CACHE_VOLUME, KEYS_VOLUME, CA_VOLUME)
# The volumes in OWN_VOLUMES whose source the operator or the kubelet provides.
MADE_VOLUMES = frozenset(OWN_VOLUMES) - frozenset(USER_VOLUMES)


def account_name(service: str) -> str:
    """Returns the ServiceAccount's name. The suffix avoids a clash with the account `default` of each namespace."""
    return f"{service}-rayloom"


def group_name(service: str, revision: str, number: int = 0) -> str:
    """Returns the RayCluster's name, of at most 40 + 1 + 8 + 1 + 3 = 53 characters, which is KubeRay's limit."""
    return f"{service}-{revision}-{number}"


def revision_of(group: str) -> str:
    """Returns the revision in a RayCluster's name SERVICE-REVISION-NUMBER. Unlike a label, a name cannot be edited.

    For any other name, returns a text that is no revision, or an empty text.
    """
    return group.rpartition("-")[0].rpartition("-")[2]


def admin_secret_name(group: str) -> str:
    return f"{group}-admin"


def gateway_name(service: str) -> str:
    """Returns the name of the gateway's Deployment, Service, PodDisruptionBudget, and HTTPRoute or Ingress."""
    return f"{service}-gateway"


def engines_name(service: str) -> str:
    """Returns the name of the headless Service by which gateways find engines."""
    return f"{service}-engines"


def gateway_secret_name(service: str, uid: str) -> str:
    """Returns the name of the Secret that engines and gateways share."""
    return secret_name(gateway_name(service), uid)


def secret_name(prefix: str, uid: str) -> str:
    """Returns the name of a Secret of the object with this uid.

    The name contains a hash of the uid, so no other Secret has the name by chance. The hash is needed because the
    operator may not read Secrets, and so cannot find out the owner of an existing Secret.
    """
    return f"{prefix}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}"


def metadata(service: LLMService, name: str, revision: str = "", number: int = 0) -> Manifest:
    """Returns the metadata of an object that is deleted with its LLMService.

    With a revision, the object belongs to engine replica `number` of that revision. Without a revision, it belongs to
    the whole service.
    """
    return owned_metadata(KIND, service.metadata, name, labels(service, revision, number))


def owned_metadata(kind: str, owner: Metadata, name: str, labels: dict[str, str]) -> Manifest:
    """Returns the metadata of an object that is deleted with its owner. `kind`: the owner's kind."""
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels,
        "ownerReferences": [
            {"apiVersion": API_VERSION, "kind": kind, "name": owner.name, "uid": owner.uid, "controller": True}
        ],
    }


def labels(service: LLMService, revision: str = "", number: int = 0) -> dict[str, str]:
    found = {MANAGED_BY_LABEL: FIELD_MANAGER, SERVICE_LABEL: service.metadata.name}
    if revision:
        found |= {"app.kubernetes.io/name": "rayloom-engine", REVISION_LABEL: revision}
        found[GROUP_LABEL] = group_name(service.metadata.name, revision, number)
    return found


def app_labels(service: LLMService, image: str, component: str = "engine") -> dict[str, str]:
    """Returns Kubernetes' recommended labels for the pods of a component. Tools group pods by these labels.

    See https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/. The version is the image's
    tag, if it has one. No selector uses these labels, and no revision depends on them.
    """
    return app_labels_of(service.metadata.name, image, component)


def app_labels_of(instance: str, image: str, component: str) -> dict[str, str]:
    """Returns the labels that `app_labels` describes, for the pods of the object named `instance`."""
    found = {"instance": instance, "component": component, "part-of": "rayloom"}
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", tag):
        found["version"] = tag
    return {f"app.kubernetes.io/{name}": value for name, value in found.items()}


def object_path(api_version: str, kind: str, namespace: str = "", name: str = "") -> str:
    """Returns the URL path of an object.

    Without `name`: the path by which all objects of the kind in the namespace are listed. Without `name` and
    `namespace`: the path by which they are listed in the whole cluster.
    """
    path = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    path += f"/namespaces/{namespace}" if namespace else ""
    # This rule is wrong for some English words, but right for every kind that the operator uses.
    plural = re.sub("(?<![aeiou])ys$", "ies", f"{kind.lower()}s").replace("sss", "sses")
    return f"{path}/{plural}" + (f"/{name}" if name else "")


def path_of(manifest: Manifest) -> str:
    """Returns the URL path of the object that a manifest describes."""
    meta = manifest["metadata"]
    return object_path(manifest["apiVersion"], manifest["kind"], meta.get("namespace", ""), meta["name"])
