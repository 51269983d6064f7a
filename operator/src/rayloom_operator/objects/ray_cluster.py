"""The RayCluster of one engine ("group"): a head pod with Ray's head and the engine, and a worker pod for each stage.

It is never changed: another revision is another RayCluster. KubeRay 1.6 adds the `ray start` commands, the Secret of
Ray's token, the head's Service, and to each worker an init container that waits for the head.
"""

from __future__ import annotations

from rayloom_operator.api import LLMService
from rayloom_operator.names import (
    ADMIN_PORT,
    API_PORT,
    CLUSTER_LABEL,
    CONFIG_FOLDER,
    ENGINE_CONTAINER,
    HEAD_CONTAINER,
    NODE_TYPE_LABEL,
    RANK_PORT,
    WORKER_CONTAINER,
    Manifest,
    group_name,
    labels,
    metadata,
)
from rayloom_operator.objects.admin_secret import TOKEN_KEY, admin_secret_name
from rayloom_operator.objects.config_map import CONFIG_KEY
from rayloom_operator.objects.pod import (
    RAY_HEALTH,
    RAY_START,
    RAYLET_PORT,
    container,
    environment,
    model_mount,
    model_volume,
    pod_spec,
    scratch_volume,
    shared_memory_volume,
)

RAY_VERSION = "2.60.0"  # of the engine's image; KubeRay decides by it what it may use
_GCS_PORT = 6379
# Exists while the engine runs. The ranks live on the head's Ray, so it stays until the engine has drained.
_ALIVE_FILE = "/tmp/ray/engine.alive"
# Seconds that an engine needs to end after its drain.
_END_SECONDS = 15
# What the head asks for, measured lean: Ray's processes 330 MiB, supervisor, front and core (no weights) 400 MiB.
_HEAD_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
_ENGINE_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
_RANK_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
# No CPU limit by default: a rank is as fast as its node lets it be.


def ray_cluster(service: LLMService, revision: str, image: str) -> Manifest:
    """The RayCluster. `image` is the resolved image of every container."""
    group = group_name(service.metadata.name, revision)
    num_workers = service.spec.parallelism.pipeline
    template_labels = labels(service, revision)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata(service, group, template_labels),
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                # No CPU for Ray's actors: no rank lands here.
                "rayStartParams": RAY_START | {"num-cpus": "0", "include-dashboard": "false", "no-monitor": "true"},
                "template": {
                    "metadata": {"labels": template_labels},
                    "spec": _head_pod(service, group, image),
                },
            },
            "workerGroupSpecs": [
                {
                    "groupName": "engine",
                    # KubeRay wants all three, or it takes two thousand million for the last.
                    "replicas": num_workers,
                    "minReplicas": num_workers,
                    "maxReplicas": num_workers,
                    "rayStartParams": RAY_START | {"num-cpus": "1"},
                    "template": {
                        "metadata": {"labels": template_labels},
                        "spec": _worker_pod(service, group, image),
                    },
                }
            ],
        },
    }


def _head_pod(service: LLMService, group: str, image: str) -> Manifest:
    return pod_spec(service) | {
        # Ray finds its local raylet by looking through the command lines of processes.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": service.spec.drain_seconds + _END_SECONDS,
        "containers": [_ray_head(service, group, image), _engine(service, group, image)],
        "volumes": [
            scratch_volume("ray"),
            scratch_volume("head-scratch"),
            scratch_volume("engine-scratch"),
            shared_memory_volume(),
            {
                "name": "config",
                "projected": {
                    "sources": [
                        {"configMap": {"name": group, "items": [{"key": CONFIG_KEY, "path": CONFIG_KEY}]}},
                        {
                            "secret": {
                                "name": admin_secret_name(group),
                                "items": [{"key": TOKEN_KEY, "path": f"admin/{TOKEN_KEY}"}],
                            }
                        },
                    ]
                },
            },
            *model_volume(service),
        ],
    }


def _ray_head(service: LLMService, group: str, image: str) -> Manifest:
    wait = f"while [ -e {_ALIVE_FILE} ]; do sleep 0.1; done"
    return container(service, HEAD_CONTAINER, image) | {
        "env": environment(service, group, RAY_HEALTH),
        "resources": {"requests": _HEAD_REQUESTS},
        "volumeMounts": [
            {"name": "ray", "mountPath": "/tmp/ray"},
            {"name": "head-scratch", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", wait]}}},
        **_ray_probes(_GCS_PORT),
    }


def _engine(service: LLMService, group: str, image: str) -> Manifest:
    ray = (
        ("RAY_ADDRESS", f"127.0.0.1:{_GCS_PORT}"),
        # Longer than the head's own: the engine outlives a restart of Ray's head.
        ("RAY_gcs_rpc_server_reconnect_timeout_s", "60"),
        ("RAYLOOM_TERMINATION_LOG", "/dev/termination-log"),
        ("RAYLOOM_ALIVE_FILE", _ALIVE_FILE),
    )
    return container(service, ENGINE_CONTAINER, image) | {
        "command": ["rayloom-engine", "serve", "--config", f"{CONFIG_FOLDER}/{CONFIG_KEY}"],
        "env": environment(service, group, ray),
        "ports": [
            {"name": "http", "containerPort": API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
            {"name": "ranks", "containerPort": RANK_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": _ENGINE_REQUESTS},
        # No liveness probe: loading takes as long as it takes, and the supervisor restarts what dies or hangs.
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": API_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "volumeMounts": [
            {"name": "ray", "mountPath": "/tmp/ray"},
            {"name": "engine-scratch", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            *model_mount(service),
        ],
    }


def _worker_pod(service: LLMService, group: str, image: str) -> Manifest:
    given = service.spec.engine.resources
    # Kubernetes takes a limit as the request where none is given, and refuses a request above its limit.
    defaults = {name: value for name, value in _RANK_REQUESTS.items() if name not in given.limits}
    resources: Manifest = {"requests": defaults | given.requests}
    if given.limits:
        resources["limits"] = given.limits
    return pod_spec(service) | {
        # Ranks hold nothing that must be saved.
        "terminationGracePeriodSeconds": 3,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # A hard rule would count a dead node as a place, and leave the replacement of its pod pending.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {CLUSTER_LABEL: group, NODE_TYPE_LABEL: "worker"}},
            }
        ],
        "containers": [
            container(service, WORKER_CONTAINER, image)
            | {
                "env": environment(service, group, RAY_HEALTH),
                "resources": resources,
                "volumeMounts": [
                    {"name": "ray", "mountPath": "/tmp/ray"},
                    {"name": "scratch", "mountPath": "/tmp"},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *model_mount(service),
                ],
                **_ray_probes(RAYLET_PORT),
            }
        ],
        "volumes": [scratch_volume("ray"), scratch_volume("scratch"), shared_memory_volume(), *model_volume(service)],
    }


def _ray_probes(port: int) -> Manifest:
    """Probes of a Ray container. KubeRay's own begin after 10 s, and the pod would be unready so long for nothing."""
    return {
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {
            "tcpSocket": {"port": port},
            "initialDelaySeconds": 30,
            "periodSeconds": 5,
            "failureThreshold": 24,
        },
    }
