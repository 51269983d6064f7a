"""The RayCluster of one engine ("group"): a head pod with Ray's head and the engine, and a worker pod for each stage.

It is never changed: another revision is another RayCluster. KubeRay 1.6 adds the `ray start` commands, the Secret of
Ray's token, the head's Service, and to each worker an init container that waits for the head. Everything here holds
under Kubernetes' restricted pod security, but for `file://` models: those are host paths.
"""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.resolved import Resolved

RAY_VERSION = "2.60.0"  # of the engine's image; KubeRay decides by it what it may use
# The user of the engine's image. Both containers of the head pod need the same one: Ray's sockets belong to it.
_USER = 1000
_GCS_PORT = 6379
_RAYLET_PORT = 6380
# Exists while the engine runs. The ranks live on the head's Ray, so it stays until the engine has drained.
_ALIVE_FILE = "/tmp/ray/engine.alive"
# Seconds that an engine needs to end after its drain.
_END_SECONDS = 15
# What the head asks for, measured lean: Ray's processes 330 MiB, supervisor, front and core (no weights) 400 MiB.
_HEAD_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
_ENGINE_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
# No CPU limit by default: a rank is as fast as its node lets it be.
_RANK_CPU_MILLIS = 500
_RANK_MEMORY_GIB = 1
# Shared memory counts as the pod's memory; Ray's object store takes 75 MiB of it.
_SHARED_MEMORY = {"medium": "Memory", "sizeLimit": "512Mi"}

# Ray's own settings notice a lost node after a minute. These do within 6 s; head and workers must agree.
_RAY_HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}
_ENGINE_PROBE = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2}
_ENGINE_VARIABLES = {
    "RAY_ADDRESS": f"127.0.0.1:{_GCS_PORT}",
    # Longer than the head's own: the engine outlives a restart of Ray's head.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    "RAYLOOM_TERMINATION_LOG": "/dev/termination-log",
    "RAYLOOM_ALIVE_FILE": _ALIVE_FILE,
}
# Ray picks these at random unless they are given, and then no firewall rule can name them.
_RAY_START = {
    "disable-usage-stats": "true",
    "include-log-monitor": "no",  # KubeRay drops a "false"
    "object-store-memory": "78643200",  # bytes, Ray's minimum: ranks pass no objects
    "node-manager-port": str(_RAYLET_PORT),
    "object-manager-port": "6381",
    "runtime-env-agent-port": "6382",
    "dashboard-agent-grpc-port": "6383",
    "min-worker-port": "10002",
    "max-worker-port": "10100",
}


# The operator replaces an engine whose head pod is gone. A new head would kill the old one's workers anyway.
_NO_OTHER_HEAD = {"ray.io/disable-provisioned-head-restart": "true"}


def ray_cluster(resolved: Resolved, revision: str, number: int = 0) -> Manifest:
    """The RayCluster of the service's engine with this number."""
    service = resolved.service
    group = names.group_name(service.metadata.name, revision, number)
    labels = names.labels(service, revision, number)
    head, worker = _head_pod(resolved, group), _worker_pod(resolved, group)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": names.metadata(service, group, revision, number) | {"annotations": _NO_OTHER_HEAD},
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                # No CPU for Ray's actors: no rank lands here.
                "rayStartParams": _RAY_START | {"num-cpus": "0", "include-dashboard": "false", "no-monitor": "true"},
                "template": {"metadata": {"labels": labels}, "spec": head},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "engine",
                    # KubeRay wants all three, or it takes two thousand million for the last.
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), resolved.num_pods),
                    # One for each rank, whatever the pod may use: this only says how many ranks fit.
                    "rayStartParams": _RAY_START | {"num-cpus": str(resolved.ranks_per_pod)},
                    "template": {"metadata": {"labels": labels}, "spec": worker},
                }
            ],
        },
    }


def _head_pod(resolved: Resolved, group: str) -> Manifest:
    service, image = resolved.service, resolved.image
    config = {"name": group, "items": [{"key": names.CONFIG_KEY, "path": names.CONFIG_KEY}]}
    token = {
        "name": names.admin_secret_name(group),
        "items": [{"key": names.TOKEN_KEY, "path": f"admin/{names.TOKEN_KEY}"}],
    }
    return _pod(service) | {
        # Ray finds its local raylet by looking through the command lines of processes.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": service.spec.drain_seconds + _END_SECONDS,
        "containers": [_ray_head(service, group, image), _engine(service, group, image)],
        "volumes": [
            *({"name": name, "emptyDir": {}} for name in ("ray", "head-scratch", "engine-scratch")),
            {"name": "shared-memory", "emptyDir": _SHARED_MEMORY},
            {"name": "config", "projected": {"sources": [{"configMap": config}, {"secret": token}]}},
            *_model_volume(service),
        ],
    }


def _ray_head(service: LLMService, group: str, image: str) -> Manifest:
    wait = f"while [ -e {_ALIVE_FILE} ]; do sleep 0.1; done"
    return _container(service, names.HEAD_CONTAINER, image) | {
        "env": _environment(service, group, _RAY_HEALTH),
        "resources": {"requests": _HEAD_REQUESTS},
        "volumeMounts": _mounts("head-scratch"),
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", wait]}}},
        **_ray_probes(_GCS_PORT),
    }


def _engine(service: LLMService, group: str, image: str) -> Manifest:
    ports = {"http": names.API_PORT, "admin": names.ADMIN_PORT, "ranks": names.RANK_PORT}
    return _container(service, names.ENGINE_CONTAINER, image) | {
        "command": ["rayloom-engine", "serve", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_KEY}"],
        "env": _environment(service, group, _ENGINE_VARIABLES),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": {"requests": _ENGINE_REQUESTS},
        # No liveness probe: loading takes as long as it takes, and the supervisor restarts what dies or hangs.
        "readinessProbe": {"httpGet": {"path": "/ready", "port": names.API_PORT}, **_ENGINE_PROBE},
        "volumeMounts": [
            *_mounts("engine-scratch"),
            {"name": "config", "mountPath": names.CONFIG_FOLDER, "readOnly": True},
            *_model_mount(service),
        ],
    }


def _worker_pod(resolved: Resolved, group: str) -> Manifest:
    service, num_ranks = resolved.service, resolved.ranks_per_pod
    given = service.spec.engine.resources
    defaults = {"cpu": f"{_RANK_CPU_MILLIS * num_ranks}m", "memory": f"{_RANK_MEMORY_GIB * num_ranks}Gi"}
    # Kubernetes takes a limit as the request where none is given, and refuses a request above its limit.
    defaults = {name: value for name, value in defaults.items() if name not in given.limits}
    resources: Manifest = {"requests": defaults | given.requests}
    if given.limits:
        resources["limits"] = given.limits
    worker = _container(service, names.WORKER_CONTAINER, resolved.image) | {
        "env": _environment(service, group, _RAY_HEALTH),
        "resources": resources,
        "volumeMounts": [*_mounts("scratch"), *_model_mount(service)],
        **_ray_probes(_RAYLET_PORT),
    }
    return _pod(service) | {
        # Ranks hold nothing that must be saved.
        "terminationGracePeriodSeconds": 3,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # A hard rule would count a dead node as a place, and leave the replacement of its pod pending.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {names.CLUSTER_LABEL: group, names.NODE_TYPE_LABEL: "worker"}},
            }
        ],
        "containers": [worker],
        "volumes": [
            *({"name": name, "emptyDir": {}} for name in ("ray", "scratch")),
            {"name": "shared-memory", "emptyDir": _SHARED_MEMORY},
            *_model_volume(service),
        ],
    }


def _pod(service: LLMService) -> Manifest:
    """The fields of a pod's spec that do not depend on what it does."""
    seconds = service.spec.recovery.node_loss_seconds
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    return {
        "serviceAccountName": names.account_name(service.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [{"key": f"node.kubernetes.io/{taint}", **toleration} for taint in ("not-ready", "unreachable")],
    }


def _container(service: LLMService, name: str, image: str) -> Manifest:
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


def _environment(service: LLMService, group: str, own: dict[str, str]) -> list[Manifest]:
    """The environment of a container in which Ray or the engine runs. The manifest's own variables replace ours.

    Each name is there once, or the API server refuses the object. KubeRay sets the token's two variables itself in the
    first container of a pod, to just these values.
    """
    variables: dict[str, Manifest] = {name: {"value": value} for name, value in own.items()}
    variables["RAY_AUTH_MODE"] = {"value": "token"}
    variables["RAY_AUTH_TOKEN"] = {"valueFrom": {"secretKeyRef": {"name": group, "key": "auth_token"}}}
    variables["RAYLOOM_NODE_NAME"] = {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    variables |= {variable.name: {"value": variable.value} for variable in service.spec.engine.env}
    return [{"name": name, **source} for name, source in variables.items()]


def _mounts(scratch: str) -> list[Manifest]:
    """What every container writes to; Ray's folder and shared memory are those of the whole pod."""
    folders = {"ray": "/tmp/ray", scratch: "/tmp", "shared-memory": "/dev/shm"}
    return [{"name": name, "mountPath": path} for name, path in folders.items()]


def _model_volume(service: LLMService) -> list[Manifest]:
    """The node's folder or file of a `file://` model; empty for other sources."""
    path = _model_path(service)
    kind = "File" if path.endswith(".gguf") else "Directory"
    return [{"name": names.MODEL_VOLUME, "hostPath": {"path": path, "type": kind}}] if path else []


def _model_mount(service: LLMService) -> list[Manifest]:
    """Mounts the model at the path that it has on the node, so that the engine's config holds on any machine."""
    path = _model_path(service)
    return [{"name": names.MODEL_VOLUME, "mountPath": path, "readOnly": True}] if path else []


def _model_path(service: LLMService) -> str:
    model = service.spec.model
    return model.source.removeprefix("file://").rstrip("/") if model.source_kind == "file" else ""


def _ray_probes(port: int) -> Manifest:
    """Probes of a Ray container. KubeRay's own begin after 10 s, and the pod would be unready so long for nothing."""
    probe = {"tcpSocket": {"port": port}}
    return {
        "readinessProbe": probe | {"periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": probe | {"initialDelaySeconds": 30, "periodSeconds": 5, "failureThreshold": 24},
    }
