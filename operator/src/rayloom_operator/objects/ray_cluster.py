"""Builds the RayCluster of one engine replica: a head pod (Ray's head, the engine) and worker pods (the ranks).

A RayCluster is never updated: a new revision gets a new RayCluster. KubeRay 1.6 adds the `ray start` commands, the
Secret with Ray's token, the head's Service, and in each worker an init container that waits for the head. The pods pass
Kubernetes' restricted pod security, except with `file://` models, which are host paths.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_operator import names
from rayloom_operator.api.base import number_of
from rayloom_operator.api.spec import LLMService, Metadata
from rayloom_operator.names import Manifest
from rayloom_operator.objects.pod import (
    api_keys_volumes,
    container_basics,
    environment,
    model_mounts,
    model_variables,
    model_volumes,
    pod_basics,
)
from rayloom_operator.objects.pod_template import with_template
from rayloom_operator.objects.scheduler_labels import scheduler_annotations, scheduler_labels
from rayloom_operator.objects.scratch import RESOURCE, scratch_mebibytes, scratch_volume
from rayloom_operator.objects.tls.files import engines_secret_name, tls_source
from rayloom_operator.resolve.load import CPU_RANK_BYTES, RAY_POD_BYTES
from rayloom_operator.resolve.resolved import Resolved

RAY_VERSION = "2.60.0"  # the Ray of the engine's image; KubeRay chooses features by this version
_GCS_PORT = 6379
_RAYLET_PORT = 6380
# This file contains the engine's process id while the engine runs. The draining engine's ranks need Ray's head, so the
# preStop hook of Ray's container waits until the engine has exited. Engines of older versions write an empty file and
# remove it when they exit.
_ALIVE_FILE = "/tmp/ray/engine.alive"
_IS_ALIVE = f'[ -e {_ALIVE_FILE} ] && {{ [ ! -s {_ALIVE_FILE} ] || kill -0 "$(cat {_ALIVE_FILE})"; }}'
_WAIT_FOR_ENGINE = f"while {_IS_ALIVE}; do sleep 0.1; done 2> /dev/null"
# The preStop hook of worker pods, which keeps the ranks running until the engine has drained. The port of Ray's head is
# not passed, because `linger` has it as the default. Engines of older versions have no option for this port.
_WAIT_FOR_DRAIN = ["python3", "-m", "rayloom_engine.linger"]
_WAIT_FOR_DRAIN += ["--rank-port", str(names.RANK_PORT), "--port", str(names.API_PORT)]
# Seconds between the removal of a terminating pod's endpoint and SIGTERM. kube-proxy on every node needs a moment to
# stop sending new requests to the pod. The engine refuses requests after SIGTERM.
_UNROUTE_SECONDS = 2
# Seconds by which a pod's grace period is longer than drainSeconds.
_END_SECONDS = 15
# Resource requests of the head pod's containers. Measured: Ray's processes use 160 MiB, or with agents 260 MiB;
# supervisor, front and core, which hold no weights, use 400 MiB.
_HEAD_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
_ENGINE_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
# Containers have no CPU limit by default, so a rank can use all idle cores of its node.
_RANK_CPU_MILLIS = 500
_LEAST_RANK_MIB = 1024
# Host memory of a rank on a GPU: torch with CUDA's libraries, and one tensor of the checkpoint while it is loaded. An
# estimate.
_CUDA_RANK_MIB = 4096
# Sizes of /dev/shm in MiB, which count towards the pod's memory. _SHARED_MIB is for Ray, whose object store uses 75
# MiB. _NCCL_MIB is for each rank on a GPU: NCCL needs shared memory for each pair of ranks.
_SHARED_MIB, _NCCL_MIB = 512, 512
_HOST_FILE_HEADER_BYTES = 4096  # of the header of the file with copies of KV blocks

# With Ray's defaults a lost node is detected after a minute, with these settings within 6 s. Head and workers must have
# the same settings. The drain time-out is 0: with the default, a terminating Ray node waits 30 s for Ray's own tasks.
# Ray's memory monitor is off, because it kills ranks when other pods fill the node's memory. The kernel and the kubelet
# enforce the pod's own limit. Workers get no niceness: with Ray's default of 15, ranks lose their CPU time to the other
# processes of the node. With RAYLOOM_LEAN_RAY the engine's image starts Ray without its agents.
_RAY_VARIABLES = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAYLOOM_LEAN_RAY": "1",
}
_ENGINE_PROBE = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2}
_ENGINE_VARIABLES = {
    "RAY_ADDRESS": f"127.0.0.1:{_GCS_PORT}",
    # Ray's containers have 5 s for this setting. The engine has a longer time, so that it survives a restart of Ray's
    # head.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    "RAYLOOM_TERMINATION_LOG": "/dev/termination-log",
    "RAYLOOM_ALIVE_FILE": _ALIVE_FILE,
}
# The ports are fixed: by default, Ray chooses random ports, which firewall rules cannot name.
_RAY_START = {
    "disable-usage-stats": "true",
    "include-log-monitor": "no",  # KubeRay drops a parameter whose value is "false"
    "object-store-memory": "78643200",  # bytes, Ray's minimum: ranks store no objects in it
    "node-manager-port": str(_RAYLET_PORT),
    "object-manager-port": "6381",
    "runtime-env-agent-port": "6382",
    "dashboard-agent-grpc-port": "6383",
    "min-worker-port": "10002",
    "max-worker-port": "10100",
}


# KubeRay must not replace a lost head pod: the replacement would stop the workers. The operator recreates the whole
# engine replica instead.
_NO_OTHER_HEAD = {"ray.io/disable-provisioned-head-restart": "true"}
# `_KEEP_RAY` restarts Ray's head inside the container. A restart of the container would make the pod unready, and the
# kubelet waits longer before each further restart. But if the head exits within 10 s, or four times within ten minutes,
# the container exits too. The pod's status then counts the restart. KUBERAY_GEN_RAY_START_CMD has KubeRay's `ray start`
# command.
_OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
_KEEP_RAY = """\
ulimit -n 65536
ends=()
while began=$SECONDS; eval "$KUBERAY_GEN_RAY_START_CMD"; code=$?; ends+=("$SECONDS")
    (( SECONDS - began >= 10 && (${#ends[@]} < 4 || SECONDS - ends[-4] > 600) ))
do echo "Ray's head has ended with exit code $code and is started again" >&2; done
echo "Ray's head has ended with exit code $code, at once or too often, and its container ends" >&2
exit 1
"""


def ray_cluster(resolved: Resolved, revision: str, number: int = 0, metadata: Metadata | None = None) -> Manifest:
    """The RayCluster of engine replica `number` of a revision.

    `metadata`: the LLMService's current metadata, if `resolved` is an earlier spec. The current metadata gives the
    labels and annotations for queues, because the queues in the earlier metadata may no longer exist.
    """
    service = resolved.service
    metadata = metadata or service.metadata
    group = names.group_name(service.metadata.name, revision, number)
    labels = names.labels(service, revision, number) | names.app_labels(service, resolved.image)
    head: Manifest = {"metadata": {"labels": labels, "annotations": _OWN_COMMAND}, "spec": _head_pod(resolved, group)}
    worker: Manifest = {"metadata": {"labels": labels}, "spec": _worker_pod(resolved, group)}
    given = service.spec.pod_template
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": names.metadata(service, group, revision, number)
        | {
            "labels": scheduler_labels(metadata) | labels,
            "annotations": scheduler_annotations(metadata) | _NO_OTHER_HEAD,
        },
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                # With 0 CPUs, Ray places no rank on the head.
                "rayStartParams": _RAY_START | {"num-cpus": "0", "include-dashboard": "false", "no-monitor": "true"},
                "template": with_template(service, given.head, head, resolved.hub),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "engine",
                    # replicas, minReplicas and maxReplicas are all given, because KubeRay's default of maxReplicas is
                    # 2147483647.
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), resolved.num_pods),
                    # Ray counts one CPU (and one GPU) for each rank of the pod, whatever the pod requests from
                    # Kubernetes.
                    "rayStartParams": _RAY_START | dict.fromkeys(_rank_kinds(resolved), str(resolved.ranks_per_pod)),
                    "template": with_template(service, given.worker, worker, resolved.hub),
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
    return pod_basics(service) | {
        # In the engine's container, Ray looks for the raylet in the list of processes. So this list must include the
        # processes of Ray's container.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": service.spec.drain_seconds + _END_SECONDS,
        "containers": [_ray_head(service, group, image), _engine(resolved, group)],
        "volumes": [
            *({"name": name, "emptyDir": {}} for name in ("ray", "head-scratch")),
            scratch_volume("engine-scratch", scratch_mebibytes(resolved, has_ranks=False), _engine_resources(resolved)),
            _shared_memory(_SHARED_MIB),
            {
                "name": "config",
                "projected": {"sources": [{"configMap": config}, {"secret": token}, *_front_files(resolved)]},
            },
            *api_keys_volumes(service),
            *model_volumes(service, resolved.hub),
        ],
    }


def _front_files(resolved: Resolved) -> list[Manifest]:
    """Returns the sources of the files for the front port: the shared key, and the certificate for TLS.

    Empty without spec.gateway.
    """
    service = resolved.service
    if service.spec.gateway is None:
        return []
    path = names.FRONT_KEY_FILE.removeprefix(f"{names.CONFIG_FOLDER}/")
    name = names.gateway_secret_name(service.metadata.name, service.metadata.uid)
    key = {"secret": {"name": name, "items": [{"key": names.FRONT_KEY, "path": path}]}}
    return [key, tls_source(engines_secret_name(service))] if resolved.has_tls else [key]


def _ray_head(service: LLMService, group: str, image: str) -> Manifest:
    return container_basics(service, names.HEAD_CONTAINER, image) | {
        "command": ["bash", "-c", _KEEP_RAY],
        "env": _environment(service, group, _RAY_VARIABLES),
        "resources": _head_resources(service, names.HEAD_CONTAINER, _HEAD_REQUESTS),
        "volumeMounts": _mounts("head-scratch"),
        "lifecycle": _before_the_end("sh", "-c", _WAIT_FOR_ENGINE),
        # The readiness probe of Ray's container connects to the engine's API port. So the pod stays ready while Ray's
        # head restarts: the engine still accepts requests and lets them wait.
        **_ray_probes(_GCS_PORT, names.API_PORT),
    }


def _engine(resolved: Resolved, group: str) -> Manifest:
    service = resolved.service
    ports = {"http": names.API_PORT, "admin": names.ADMIN_PORT, "ranks": names.RANK_PORT}
    if service.spec.gateway is not None:
        ports["front"] = names.FRONT_PORT
    return container_basics(service, names.ENGINE_CONTAINER, resolved.image) | {
        "command": ["rayloom-engine", "serve", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_KEY}"],
        "env": _environment(service, group, _ENGINE_VARIABLES, model_variables(service, resolved.hub)),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": _engine_resources(resolved),
        # There is no liveness probe: loading has no time limit, and the engine's supervisor restarts processes that die
        # or hang.
        "readinessProbe": {"httpGet": {"path": "/ready", "port": names.API_PORT}, **_ENGINE_PROBE},
        "lifecycle": _before_the_end("sleep", str(_UNROUTE_SECONDS)),
        "volumeMounts": [
            *_mounts("engine-scratch"),
            {"name": "config", "mountPath": names.CONFIG_FOLDER, "readOnly": True},
            *model_mounts(service, resolved.hub),
            *(
                {"name": each["name"], "mountPath": names.KEYS_FOLDER, "readOnly": True}
                for each in api_keys_volumes(service)
            ),
        ],
    }


def _worker_pod(resolved: Resolved, group: str) -> Manifest:
    service, num_ranks = resolved.service, resolved.ranks_per_pod
    worker = container_basics(service, names.WORKER_CONTAINER, resolved.image) | {
        "env": _environment(service, group, _RAY_VARIABLES, model_variables(service, resolved.hub)),
        "resources": _worker_resources(resolved),
        "volumeMounts": [*_mounts("scratch"), *model_mounts(service, resolved.hub)],
        "lifecycle": _before_the_end(*_WAIT_FOR_DRAIN),
        **_ray_probes(_RAYLET_PORT),
    }
    return pod_basics(service) | {
        # KubeRay's init container runs a shell that waits for the head. As process 1, the shell would ignore SIGTERM. A
        # pod that is deleted during the wait would then stay for the whole grace period. In a shared process namespace,
        # the shell is not process 1.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": service.spec.drain_seconds + _END_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # DoNotSchedule would count a lost node as a domain and keep the replacement of its pod pending.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {names.CLUSTER_LABEL: group, names.NODE_TYPE_LABEL: "worker"}},
            }
        ],
        "containers": [worker],
        "volumes": [
            {"name": "ray", "emptyDir": {}},
            scratch_volume("scratch", scratch_mebibytes(resolved, has_ranks=True), worker["resources"]),
            _shared_memory(
                _SHARED_MIB
                + _NCCL_MIB * num_ranks * (service.spec.accelerator is not None)
                + num_ranks * _host_copies_mib(service)
            ),
            *model_volumes(service, resolved.hub),
        ],
    }


def _engine_resources(resolved: Resolved) -> Manifest:
    requests = _ENGINE_REQUESTS | _scratch_request(scratch_mebibytes(resolved, has_ranks=False))
    return _head_resources(resolved.service, names.ENGINE_CONTAINER, requests)


def _head_resources(service: LLMService, name: str, requests: dict[str, str]) -> Manifest:
    """Returns the resources of the head pod's container `name`: those of the template, with `requests` as defaults."""
    container = service.spec.pod_template.head.spec.container(name)
    given = container.resources if container is not None else None
    if given is None:
        return {"requests": requests}
    limits = given.limits or {}
    found = {"requests": _within_limits(requests, limits) | (given.requests or {})}
    return found | ({"limits": limits} if limits else {})


def _within_limits(requests: dict[str, str], limits: Mapping[str, str]) -> dict[str, str]:
    """Returns `requests` without those above their limit.

    Kubernetes refuses a request above its limit. If there is no request, Kubernetes takes the limit as the request. A
    request below its limit is kept, so that a node need not have the whole limit free.
    """
    return {
        name: value
        for name, value in requests.items()
        if name not in limits or number_of(value) <= number_of(limits[name])
    }


def _without_limits(requests: dict[str, str], limits: Mapping[str, str]) -> dict[str, str]:
    """Returns `requests` without those that have a limit: Kubernetes then requests the limit."""
    return {name: value for name, value in requests.items() if name not in limits}


def _scratch_request(mebibytes: int) -> dict[str, str]:
    return {RESOURCE: _mebibytes(mebibytes)} if mebibytes else {}


def _rank_kinds(resolved: Resolved) -> tuple[str, ...]:
    """Returns the `ray start` parameters by which Ray knows how many ranks fit into a pod."""
    return ("num-cpus",) if resolved.service.spec.accelerator is None else ("num-cpus", "num-gpus")


def _worker_resources(resolved: Resolved) -> Manifest:
    given, accelerator = resolved.service.spec.engine.resources, resolved.service.spec.accelerator
    num_ranks = resolved.ranks_per_pod
    mebibytes = num_ranks * (_LEAST_RANK_MIB if accelerator is None else _CUDA_RANK_MIB)
    if accelerator is None and resolved.sizing is not None:
        # KV blocks are not counted: a rank on CPU allocates their memory only at first use.
        of_model = resolved.sizing.weights_bytes_per_rank + (resolved.sizing.adapters_bytes_per_rank or 0)
        # All worker pods are equal, so each has room for the draft model, which one rank of the last stage holds.
        needed = num_ranks * (of_model + CPU_RANK_BYTES) + (resolved.sizing.draft_weights_bytes or 0) + RAY_POD_BYTES
        mebibytes = max(mebibytes, -(-needed // 2**20))
    mebibytes += num_ranks * _host_copies_mib(resolved.service)
    defaults = {"cpu": f"{_RANK_CPU_MILLIS * num_ranks}m", "memory": _mebibytes(mebibytes)}
    defaults |= _scratch_request(scratch_mebibytes(resolved, has_ranks=True))
    defaults = _without_limits(defaults, given.limits)
    devices = {} if accelerator is None else {accelerator.resource: str(num_ranks)}
    limits = given.limits | devices
    return {"requests": defaults | given.requests | devices} | ({"limits": limits} if limits else {})


def _host_copies_mib(service: LLMService) -> int:
    """Returns the memory of a rank for copies of KV blocks, which the rank allocates in /dev/shm at its start."""
    num_bytes = service.spec.engine.args.kv_host_memory_bytes or 0
    return -(-(num_bytes + _HOST_FILE_HEADER_BYTES) // 2**20) if num_bytes else 0


def _mebibytes(number: int) -> str:
    return f"{number // 1024}Gi" if number % 1024 == 0 else f"{number}Mi"


def _shared_memory(mebibytes: int) -> Manifest:
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(mebibytes)}}


def _environment(
    service: LLMService, group: str, own: dict[str, str], others: dict[str, Manifest] | None = None
) -> list[Manifest]:
    """Returns the environment of a container that runs Ray or the engine. spec.engine.env overrides `own` and `others`.

    RAY_AUTH_MODE and RAY_AUTH_TOKEN are set here to KubeRay's values, because KubeRay sets them only in the first
    container of a pod.
    """
    variables: dict[str, Manifest] = {name: {"value": value} for name, value in own.items()}
    variables["RAY_AUTH_MODE"] = {"value": "token"}
    variables["RAY_AUTH_TOKEN"] = {"valueFrom": {"secretKeyRef": {"name": group, "key": "auth_token"}}}
    variables["RAYLOOM_NODE_NAME"] = {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return environment(service, variables | (others or {}))


def _mounts(scratch: str) -> list[Manifest]:
    """Returns the mounts of a container's writable folders. All containers of a pod share Ray's folder and /dev/shm."""
    folders = {"ray": "/tmp/ray", scratch: "/tmp", "shared-memory": "/dev/shm"}
    return [{"name": name, "mountPath": path} for name, path in folders.items()]


def _before_the_end(*command: str) -> Manifest:
    """The lifecycle of a container with `command` as its preStop hook, which runs before SIGTERM."""
    return {"preStop": {"exec": {"command": list(command)}}}


def _ray_probes(port: int, ready_port: int | None = None) -> Manifest:
    """Probes of a Ray container: liveness at `port`, readiness at `ready_port` or else at `port`.

    KubeRay's own probes would start after 10 s, and the pod would not be ready before.
    """
    ready, alive = ({"tcpSocket": {"port": each}} for each in (ready_port or port, port))
    return {
        "readinessProbe": ready | {"periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": alive | {"initialDelaySeconds": 30, "periodSeconds": 5, "failureThreshold": 24},
    }
