"""Builds the Deployment of the gateway pods.

The configuration is an annotation of the pods, which the downward API makes a file. So a pod and its configuration are
one object: a changed setting replaces the pods, and no pod starts with the settings of another one.
"""

from __future__ import annotations

import json

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.gateway.config import gateway_config
from rayloom_operator.objects.pod import api_keys_volumes, container_basics, pod_basics
from rayloom_operator.resolve.resolved import Resolved

CONFIG_ANNOTATION = "rayloom.dev/gateway-config"
# Measured: 120 MB at the start. The tokenizer, connections and held requests come on top of that.
_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
# Seconds between the removal of a terminating pod's endpoint and SIGTERM, and those by which the grace period is longer
# than drainSeconds: as in the head pod (`objects/ray_cluster.py`).
_UNROUTE_SECONDS = 2
_END_SECONDS = 15
_READINESS = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 2}
# A gateway without a tokenizer waits for an engine and answers /health with 503 meanwhile, so /health would restart it
# again and again. /version answers as long as the event loop runs.
_LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}


def selector(service: LLMService) -> dict[str, str]:
    """Returns the labels by which the gateway pods of a service are selected."""
    return {names.GATEWAY_LABEL: service.metadata.name}


def gateway_deployment(resolved: Resolved, gateway: Gateway) -> Manifest:
    """The Deployment. A replaced pod takes requests before an old one ends."""
    service = resolved.service
    image = gateway.image or resolved.image
    config = json.dumps(gateway_config(service, gateway), sort_keys=True)
    labels = {
        **names.labels(service),
        "app.kubernetes.io/name": "rayloom-gateway",
        **names.app_labels(service, image, "gateway"),
        **selector(service),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(service, names.gateway_name(service.metadata.name)),
        "spec": {
            "replicas": gateway.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector(service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": labels, "annotations": {CONFIG_ANNOTATION: config}},
                "spec": _pod(service, gateway, image),
            },
        },
    }


def _pod(service: LLMService, gateway: Gateway, image: str) -> Manifest:
    return pod_basics(service) | {
        "terminationGracePeriodSeconds": service.spec.drain_seconds + _END_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # As for worker pods: DoNotSchedule would keep the replacement of a pod on a lost node pending.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(service)},
            }
        ],
        "containers": [_container(service, gateway, image)],
        "volumes": [
            {"name": "config", "projected": {"sources": _sources(service)}},
            {"name": "scratch", "emptyDir": {}},
            *api_keys_volumes(service),
        ],
    }


def _sources(service: LLMService) -> list[Manifest]:
    """Returns the files in the folder of the configuration: the configuration, the shared key and the admin token."""
    field = {"fieldPath": f"metadata.annotations['{CONFIG_ANNOTATION}']"}
    secret = names.gateway_secret_name(service.metadata.name, service.metadata.uid)
    items = [
        {"key": names.FRONT_KEY, "path": names.FRONT_KEY_FILE.removeprefix(f"{names.CONFIG_FOLDER}/")},
        {"key": names.TOKEN_KEY, "path": names.ADMIN_TOKEN_FILE.removeprefix(f"{names.CONFIG_FOLDER}/")},
    ]
    return [
        {"downwardAPI": {"items": [{"path": names.CONFIG_KEY, "fieldRef": field}]}},
        {"secret": {"name": secret, "items": items}},
    ]


def _container(service: LLMService, gateway: Gateway, image: str) -> Manifest:
    ports = {"http": names.API_PORT, "admin": names.ADMIN_PORT}
    given = gateway.resources
    # Kubernetes takes a limit as the request, if there is no other.
    requests = {name: value for name, value in _REQUESTS.items() if name not in given.limits} | given.requests
    return container_basics(service, names.GATEWAY_CONTAINER, image) | {
        "command": ["rayloom-engine", "gateway", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_KEY}"],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "resources": {"requests": requests} | ({"limits": given.limits} if given.limits else {}),
        "readinessProbe": {"httpGet": {"path": "/ready", "port": names.API_PORT}, **_READINESS},
        "livenessProbe": {"httpGet": {"path": "/version", "port": names.API_PORT}, **_LIVENESS},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNROUTE_SECONDS)]}}},
        "volumeMounts": [
            {"name": "config", "mountPath": names.CONFIG_FOLDER, "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
            *(
                {"name": each["name"], "mountPath": names.KEYS_FOLDER, "readOnly": True}
                for each in api_keys_volumes(service)
            ),
        ],
    }
