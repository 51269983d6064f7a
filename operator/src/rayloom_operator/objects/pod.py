"""What the head pod and the worker pods have in common: security, environment, volumes.

Everything here holds under Kubernetes' restricted pod security, but for `file://` models: those are host paths.
"""

from __future__ import annotations

from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest

# The user of the engine's image. Both containers of the head pod need the same one: Ray's sockets belong to it.
_USER = 1000
# A node that does not answer for so long is given up: its pods are evicted.
_NODE_LOSS_SECONDS = 15
# Shared memory counts as the pod's memory; Ray's object store takes 75 MiB of it.
_SHARED_MEMORY_LIMIT = "512Mi"

# Ray's own settings notice a lost node after a minute. These do within 6 s; head and workers must agree.
RAY_HEALTH = (
    ("RAY_health_check_period_ms", "1000"),
    ("RAY_health_check_timeout_ms", "1000"),
    ("RAY_health_check_failure_threshold", "3"),
    ("RAY_health_check_initial_delay_ms", "1000"),
    ("RAY_gcs_rpc_server_reconnect_timeout_s", "5"),
    ("RAY_raylet_liveness_self_check_interval_ms", "1000"),
)
# Ray picks these at random unless they are given, and then no firewall rule can name them.
RAY_START = {
    "disable-usage-stats": "true",
    "include-log-monitor": "no",  # KubeRay drops a "false"
    "object-store-memory": "78643200",  # bytes, Ray's minimum: ranks pass no objects
    "node-manager-port": "6380",
    "object-manager-port": "6381",
    "runtime-env-agent-port": "6382",
    "dashboard-agent-grpc-port": "6383",
    "min-worker-port": "10002",
    "max-worker-port": "10100",
}
RAYLET_PORT = 6380


def pod_spec(service: LLMService) -> Manifest:
    """The fields of a pod's spec that do not depend on what it does."""
    return {
        "serviceAccountName": service.metadata.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{taint}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": _NODE_LOSS_SECONDS,
            }
            for taint in ("not-ready", "unreachable")
        ],
    }


def container(service: LLMService, name: str, image: str) -> Manifest:
    """The fields of a container that do not depend on what it runs."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": service.spec.engine.image_pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last lines of the log say why a process of Ray's ended; the engine leaves a sentence of its own.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def environment(service: LLMService, group: str, ray: tuple[tuple[str, str], ...]) -> list[Manifest]:
    """The environment of a container in which Ray or the engine runs. The manifest's own variables come last.

    KubeRay sets the token's two variables itself in the first container of a pod, to just these values.
    """
    return [
        *({"name": name, "value": value} for name, value in ray),
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": group, "key": "auth_token"}}},
        {"name": "RAYLOOM_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": variable.name, "value": variable.value} for variable in service.spec.engine.env),
    ]


def scratch_volume(name: str) -> Manifest:
    return {"name": name, "emptyDir": {}}


def shared_memory_volume() -> Manifest:
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY_LIMIT}}


def model_volume(service: LLMService) -> list[Manifest]:
    """The node's folder or file of a `file://` model; empty for other sources."""
    path = model_path(service)
    if path is None:
        return []
    kind = "File" if path.endswith(".gguf") else "Directory"
    return [{"name": MODEL_VOLUME, "hostPath": {"path": path, "type": kind}}]


def model_mount(service: LLMService) -> list[Manifest]:
    """Mounts the model at the path that it has on the node, so that the engine's config holds on any machine."""
    path = model_path(service)
    return [] if path is None else [{"name": MODEL_VOLUME, "mountPath": path, "readOnly": True}]


def model_path(service: LLMService) -> str | None:
    """The path of a `file://` model; None for other sources."""
    if service.spec.model.source_kind != "file":
        return None
    return service.spec.model.source.removeprefix("file://").rstrip("/")


MODEL_VOLUME = "model"
