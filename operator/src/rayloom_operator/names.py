"""Names, labels and ports that the objects share, and the reference that ties each to its LLMService."""

from __future__ import annotations

from typing import Any

from rayloom_operator.api import API_VERSION, KIND, LLMService

Manifest = dict[str, Any]

API_GROUP, API_VERSION_NAME = API_VERSION.split("/")
API_PLURAL = "llmservices"

SERVICE_LABEL = "rayloom.dev/service"
GROUP_LABEL = "rayloom.dev/group"
REVISION_LABEL = "rayloom.dev/revision"
# Set and removed by the operator on running pods, never in a template: a new pod takes no requests by itself.
ROUTE_LABEL = "rayloom.dev/route"
# KubeRay's own, on each of its pods.
NODE_TYPE_LABEL = "ray.io/node-type"
CLUSTER_LABEL = "ray.io/cluster"

ENGINE_CONTAINER = "engine"
HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"

API_PORT = 8000
ADMIN_PORT = 8001
RANK_PORT = 8002  # at which ranks reach the core
CONFIG_FOLDER = "/etc/rayloom"
ADMIN_TOKEN_FILE = f"{CONFIG_FOLDER}/admin/token"


def group_name(service: str, revision: str) -> str:
    """The RayCluster's name: 40 + 1 + 8 + 2 characters at most, and KubeRay takes 53."""
    return f"{service}-{revision}-0"


def labels(service: LLMService, revision: str) -> dict[str, str]:
    """Labels of everything that belongs to one group."""
    return {
        "app.kubernetes.io/name": "rayloom-engine",
        "app.kubernetes.io/managed-by": "rayloom-operator",
        SERVICE_LABEL: service.metadata.name,
        GROUP_LABEL: group_name(service.metadata.name, revision),
        REVISION_LABEL: revision,
    }


def metadata(service: LLMService, name: str, own_labels: dict[str, str]) -> Manifest:
    """The metadata of an object that goes when its LLMService goes."""
    return {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": own_labels,
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.metadata.name,
                "uid": service.metadata.uid,
                "controller": True,
            }
        ],
    }


def service_labels(service: LLMService) -> dict[str, str]:
    """Labels of what outlives a group."""
    return {"app.kubernetes.io/managed-by": "rayloom-operator", SERVICE_LABEL: service.metadata.name}
