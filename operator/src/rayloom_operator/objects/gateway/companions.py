"""Builds the Services, the Secret and the PodDisruptionBudget of a service's gateway pods."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest, metadata
from rayloom_operator.objects.companions import admin_token
from rayloom_operator.objects.gateway.deployment import selector
from rayloom_operator.objects.gateway.pods import budget, http_service


def gateway_service(service: LLMService) -> Manifest:
    """The Service for clients of the gateway pods."""
    return http_service(metadata(service, names.gateway_name(service.metadata.name)), selector(service))


def gateway_endpoint(service: LLMService) -> str:
    """The URL of the gateways' API inside the cluster."""
    name = names.gateway_name(service.metadata.name)
    return f"http://{name}.{service.metadata.namespace}.svc:{names.API_PORT}"


def engines_service(service: LLMService) -> Manifest:
    """The headless Service whose DNS records are the addresses of the engines that may get requests.

    It selects the same pods as the Service for clients, so a rollout moves the gateways' requests, too. Pods that are
    not ready are included for two reasons. First, a gateway itself finds out which engines serve. Second, the streams
    of an engine must continue while the engine drains or replaces ranks.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, names.engines_name(service.metadata.name)),
        "spec": {
            "clusterIP": "None",
            # A pod with an IPv4 and an IPv6 address would count as two engines.
            "ipFamilyPolicy": "SingleStack",
            "publishNotReadyAddresses": True,
            "selector": {names.SERVICE_LABEL: service.metadata.name, names.ROUTE_LABEL: "true"},
            "ports": [{"name": "front", "port": names.FRONT_PORT, "targetPort": names.FRONT_PORT, "protocol": "TCP"}],
        },
    }


def gateway_budget(service: LLMService, gateway: Gateway) -> Manifest:
    """The PodDisruptionBudget of the gateway pods. With one pod, `kubectl drain` always proceeds."""
    return budget(metadata(service, names.gateway_name(service.metadata.name)), selector(service), gateway.replicas)


def gateway_secret(service: LLMService, operator_key: bytes) -> Manifest:
    """The Secret with the key that engines and gateways share, and the token of the gateways' admin port.

    Key and token are derived from the operator's key. So a deleted Secret is recreated with the same content, and
    running engines and gateways keep working.
    """
    meta = service.metadata
    name = names.gateway_name(meta.name)
    key = front_key(operator_key, meta.namespace, meta.uid)
    content = {names.FRONT_KEY: key, names.TOKEN_KEY: admin_token(operator_key, meta.namespace, meta.uid, name)}
    return secret(metadata(service, names.gateway_secret_name(meta.name, meta.uid)), content)


def front_key(operator_key: bytes, namespace: str, service_uid: str) -> str:
    """Returns the key with which a gateway authenticates itself to the engines of a service."""
    return hmac.new(operator_key, f"front/{namespace}/{service_uid}".encode(), hashlib.sha256).hexdigest()


def secret(metadata: Manifest, content: Mapping[str, str]) -> Manifest:
    """A Secret whose values are these texts."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": {field: base64.b64encode(text.encode()).decode() for field, text in content.items()},
    }
