"""Builds the Deployment of gateway pods: of an LLMService, or of an LLMGateway.

The configuration is an annotation of the pods, which the downward API mounts as a file. So a pod and its configuration
are one object. A changed setting replaces the pods, and a pod always starts with its own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import GatewayResources
from rayloom_operator.names import Manifest
from rayloom_operator.objects.tls.files import tls_source

CONFIG_ANNOTATION = "rayloom.dev/gateway-config"
# Memory, measured: 120 MB at the start. The tokenizer, connections and held requests come on top of that.
_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
# A terminating pod gets SIGTERM this many seconds after the removal of its endpoint. _UNROUTE_SECONDS and _END_SECONDS
# have the same values for the head pod (`objects/ray_cluster.py`).
_UNROUTE_SECONDS = 2
# The grace period is longer than drainSeconds by this many seconds.
_END_SECONDS = 15
_READINESS = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2}
# The liveness probe requests /version, which answers as long as the event loop runs. A gateway without a tokenizer
# waits for an engine, and answers 503 to /health in the meantime. With a probe of /health, the kubelet would restart
# this gateway again and again.
_LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPods:
    """The inputs of `deployment` in which the gateway pods of LLMServices and of LLMGateways differ."""

    metadata: Manifest  # metadata of the gateway pods' Deployment
    labels: Mapping[str, str]  # further labels of the pods, besides `selector`
    selector: Mapping[str, str]
    replicas: int
    resources: GatewayResources
    drain_seconds: int
    config: Mapping[str, Any]  # the GatewayConfig document
    pod: Manifest  # fields of the pod's spec from `objects/pod.py`
    container: Manifest  # fields of the container from `objects/pod.py`
    secret: str  # name of the Secret whose files are in the folder of the configuration
    secret_files: Sequence[tuple[str, str]]  # (key of that Secret, path of its file)
    tls_secret: str = ""  # name of the Secret with the certificate; empty: gateways speak clear text with engines
    volumes: Sequence[tuple[Manifest, str]]  # (further volume, folder where it is mounted)


def deployment(pods: GatewayPods) -> Manifest:
    """The Deployment. In an update, a new pod accepts requests before an old pod ends."""
    config = json.dumps(pods.config, sort_keys=True)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pods.metadata,
        "spec": {
            "replicas": pods.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": dict(pods.selector)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": {**pods.labels, **pods.selector}, "annotations": {CONFIG_ANNOTATION: config}},
                "spec": _pod(pods),
            },
        },
    }


def budget(metadata: Manifest, selector: Mapping[str, str], replicas: int) -> Manifest:
    """The PodDisruptionBudget of the gateway pods. With one pod, `kubectl drain` always proceeds."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "minAvailable": 1 if replicas > 1 else 0,
            "selector": {"matchLabels": dict(selector)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def http_service(metadata: Manifest, selector: Mapping[str, str]) -> Manifest:
    """The Service for clients of the gateway pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "selector": dict(selector),
            "ports": [{"name": "http", "port": names.API_PORT, "targetPort": names.API_PORT, "protocol": "TCP"}],
        },
    }


def _pod(pods: GatewayPods) -> Manifest:
    return pods.pod | {
        "terminationGracePeriodSeconds": pods.drain_seconds + _END_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # DoNotSchedule would count a lost node as a domain and keep the replacement of its pod pending.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(pods.selector)},
            }
        ],
        "containers": [_container(pods)],
        "volumes": [
            {"name": "config", "projected": {"sources": _sources(pods)}},
            {"name": "scratch", "emptyDir": {}},
            *(volume for volume, _ in pods.volumes),
        ],
    }


def _sources(pods: GatewayPods) -> list[Manifest]:
    """Returns the sources of the configuration's folder: the configuration itself, and files of the Secrets."""
    field = {"fieldPath": f"metadata.annotations['{CONFIG_ANNOTATION}']"}
    items = [{"key": key, "path": path.removeprefix(f"{names.CONFIG_FOLDER}/")} for key, path in pods.secret_files]
    return [
        {"downwardAPI": {"items": [{"path": names.CONFIG_KEY, "fieldRef": field}]}},
        {"secret": {"name": pods.secret, "items": items}},
        *([tls_source(pods.tls_secret)] if pods.tls_secret else []),
    ]


def _container(pods: GatewayPods) -> Manifest:
    ports = {"http": names.API_PORT, "admin": names.ADMIN_PORT}
    given = pods.resources
    # Kubernetes uses a limit as the request if no request is given.
    requests = {name: value for name, value in _REQUESTS.items() if name not in given.limits} | given.requests
    return pods.container | {
        "command": ["rayloom-engine", "gateway", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_KEY}"],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": {"requests": requests} | ({"limits": given.limits} if given.limits else {}),
        "readinessProbe": {"httpGet": {"path": "/ready", "port": names.API_PORT}, **_READINESS},
        "livenessProbe": {"httpGet": {"path": "/version", "port": names.API_PORT}, **_LIVENESS},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNROUTE_SECONDS)]}}},
        "volumeMounts": [
            {"name": "config", "mountPath": names.CONFIG_FOLDER, "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
            *({"name": volume["name"], "mountPath": folder, "readOnly": True} for volume, folder in pods.volumes),
        ],
    }
