"""The Deployment of the gateway pods of a service."""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.gateway.config import gateway_config
from rayloom_operator.objects.gateway.pods import GatewayPods, deployment
from rayloom_operator.objects.pod import api_keys_volumes, container_basics, pod_basics
from rayloom_operator.objects.tls.files import TlsMode, gateway_secret_name
from rayloom_operator.resolve.resolved import Resolved


def selector(service: LLMService) -> dict[str, str]:
    """Returns the labels by which the gateway pods of a service are selected."""
    return {names.GATEWAY_LABEL: service.metadata.name}


def gateway_deployment(resolved: Resolved, gateway: Gateway, tls: TlsMode = "off") -> Manifest:
    """The Deployment. In an update, a new pod accepts requests before an old pod ends."""
    service = resolved.service
    meta = service.metadata
    image = gateway.image or resolved.image
    labels = {
        **names.labels(service),
        "app.kubernetes.io/name": "rayloom-gateway",
        **names.app_labels(service, image, "gateway"),
    }
    return deployment(
        GatewayPods(
            metadata=names.metadata(service, names.gateway_name(meta.name)),
            labels=labels,
            selector=selector(service),
            replicas=gateway.replicas,
            resources=gateway.resources,
            drain_seconds=service.spec.drain_seconds,
            config=gateway_config(service, gateway, tls),
            pod=pod_basics(service),
            container=container_basics(service, names.GATEWAY_CONTAINER, image),
            secret=names.gateway_secret_name(meta.name, meta.uid),
            secret_files=((names.FRONT_KEY, names.FRONT_KEY_FILE), (names.TOKEN_KEY, names.ADMIN_TOKEN_FILE)),
            tls_secret="" if tls == "off" else gateway_secret_name(service),
            volumes=[(each, names.KEYS_FOLDER) for each in api_keys_volumes(service)],
        )
    )
