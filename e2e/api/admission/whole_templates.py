"""Pod templates that together have every field, and the objects that these templates name."""

from __future__ import annotations

from typing import Any

RUNTIME_CLASS = "rayloom-e2e"
PRIORITY_CLASS = "rayloom-e2e"
# (path, object) of objects without a namespace.
CLUSTER_OBJECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/apis/node.k8s.io/v1/runtimeclasses", {"metadata": {"name": RUNTIME_CLASS}, "handler": "nvidia"}),
    (
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"metadata": {"name": PRIORITY_CLASS}, "value": 7, "preemptionPolicy": "Never"},
    ),
)

_PROBE = {"tcpSocket": {"port": 9000}}
_LABELS = {"matchLabels": {"app": "other"}}
_TERM = {"labelSelector": _LABELS, "topologyKey": "kubernetes.io/hostname"}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_LINUX = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
_MOUNTS = [
    {"name": "data", "mountPath": "/data", "readOnly": True, "recursiveReadOnly": "IfPossible", "subPath": "a"},
    {"name": "data", "mountPath": "/of-pod", "subPathExpr": "$(POD)", "mountPropagation": "HostToContainer"},
]
_SECURITY: dict[str, Any] = {
    "runAsUser": 1001,
    "runAsGroup": 1001,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": False,
    "capabilities": {"add": ["IPC_LOCK"]},
    "procMount": "Default",
    "seccompProfile": {"type": "RuntimeDefault"},
    "appArmorProfile": {"type": "RuntimeDefault"},
    "seLinuxOptions": {"level": "s0:c1,c2"},
}
_VARIABLES: dict[str, Any] = {
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "POD", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
    ],
    "envFrom": [
        {"prefix": "MORE_", "configMapRef": {"name": "settings", "optional": True}},
        {"secretRef": {"name": "secrets", "optional": True}},
    ],
}


def _own(name: str, **resources: Any) -> dict[str, Any]:
    """A container that the operator creates, with every field that a template may set in it."""
    claims = [{"name": "card", "request": "one"}]
    return {
        "name": name,
        **_VARIABLES,
        "resources": {"claims": claims, **resources},
        "volumeMounts": _MOUNTS,
        "volumeDevices": [{"name": "block", "devicePath": "/dev/block0"}],
        "securityContext": _SECURITY,
    }


def _other(name: str) -> dict[str, Any]:
    """An additional container with every field."""
    resources = {"requests": {"cpu": "10m"}, "limits": {"memory": "64Mi"}}
    return {
        **_own(name, **resources),
        "image": "registry.example/proxy:1",
        "imagePullPolicy": "Always",
        "command": ["proxy"],
        "args": ["--port", "9000"],
        "workingDir": "/work",
        "ports": [{"name": "proxy", "containerPort": 9000, "protocol": "TCP"}],
        "livenessProbe": _PROBE,
        "readinessProbe": _PROBE,
        "startupProbe": _PROBE,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "1"]}}},
        "restartPolicy": "Always",
        "terminationMessagePath": "/tmp/end",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _template(*own: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"team": "search"}, "annotations": {"prometheus.io/scrape": "true"}},
        "spec": {
            "runtimeClassName": RUNTIME_CLASS,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "affinity": {
                "nodeAffinity": {
                    _REQUIRED: {"nodeSelectorTerms": [_LINUX]},
                    _PREFERRED: [{"weight": 1, "preference": _LINUX}],
                },
                "podAffinity": {_REQUIRED: [_TERM], _PREFERRED: [{"weight": 2, "podAffinityTerm": _TERM}]},
                "podAntiAffinity": {
                    _REQUIRED: [_TERM | {"labelSelector": {"matchLabels": {"app": "unwanted"}}}],
                    _PREFERRED: [{"weight": 3, "podAffinityTerm": _TERM}],
                },
            },
            "tolerations": [
                {
                    "key": "gpu",
                    "operator": "Equal",
                    "value": "a",
                    "effect": "NoExecute",
                    "tolerationSeconds": 7,
                }
            ],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 2,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": _LABELS,
                    "matchLabelKeys": ["ray.io/cluster"],
                    "minDomains": 1,
                    "nodeAffinityPolicy": "Ignore",
                    "nodeTaintsPolicy": "Honor",
                }
            ],
            "priorityClassName": PRIORITY_CLASS,
            "preemptionPolicy": "Never",
            "schedulerName": "default-scheduler",
            "imagePullSecrets": [{"name": "registry"}],
            "dnsPolicy": "None",
            "dnsConfig": {
                "nameservers": ["192.0.2.53"],
                "searches": ["example.com"],
                "options": [{"name": "ndots", "value": "2"}],
            },
            "hostAliases": [{"ip": "192.0.2.7", "hostnames": ["hub.example.com"]}],
            "securityContext": {
                "runAsUser": 1001,
                "runAsGroup": 1001,
                "runAsNonRoot": True,
                "fsGroup": 1001,
                "fsGroupChangePolicy": "Always",
                "supplementalGroups": [44],
                "supplementalGroupsPolicy": "Merge",
                "seccompProfile": {"type": "RuntimeDefault"},
                "appArmorProfile": {"type": "RuntimeDefault"},
                "seLinuxOptions": {"level": "s0:c1,c2"},
                "seLinuxChangePolicy": "Recursive",
                "sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "600"}],
            },
            "resourceClaims": [
                {"name": "card", "resourceClaimTemplateName": "card"},
                {"name": "other", "resourceClaimName": "shared"},
            ],
            "volumes": [
                {"name": "data", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "block", "persistentVolumeClaim": {"claimName": "block"}},
            ],
            "initContainers": [_other("beside")],
            "containers": [*own, _other("proxy")],
        },
    }


def _of_the_node(container: str) -> dict[str, Any]:
    privileged = {"securityContext": {"privileged": True}}
    return {
        "spec": {
            "hostNetwork": True,
            "hostIPC": True,
            "volumes": [{"name": "share", "nfs": {"server": "192.0.2.9", "path": "/models"}}],
            "initContainers": [{"name": "set-up", "image": "registry.example/set-up:1", **privileged}],
            "containers": [{"name": container, **privileged}],
        }
    }


# Several templates, because some settings exclude each other, such as the node's namespaces and a user namespace.
TEMPLATES: dict[str, dict[str, Any]] = {
    "most": {
        "user": "Operator",
        "head": _template(_own("ray-head"), _own("engine", requests={"cpu": "1"}, limits={"memory": "2Gi"})),
        "worker": _template(_own("ray-worker")),
    },
    "of-the-node": {"head": _of_the_node("engine"), "worker": _of_the_node("ray-worker")},
    "of-the-cluster": {
        "user": "Cluster",
        "head": {"spec": {"hostUsers": False}},
        "worker": {"spec": {"hostUsers": False}},
    },
}
