"""What a service has beside its RayCluster. ServiceAccount and Service outlive a group; ConfigMap and Secret are its.

The admin port's token is derived from the operator's key, so that no secret is ever read back: a restarted operator
computes it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

from rayloom_operator import names
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest, group_name, metadata
from rayloom_operator.objects.engine_config import pod_engine_config
from rayloom_operator.resolve.resolved import Resolved


def service_account(service: LLMService) -> Manifest:
    """The account of the engine's pods. It has no rights, and no pod gets its token."""
    name = names.account_name(service.metadata.name)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name),
        "automountServiceAccountToken": False,
    }


def client_service(service: LLMService) -> Manifest:
    """What clients use. It selects the head pods to which the operator routes, whatever their revision."""
    name = service.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, name),
        "spec": {
            "selector": {names.SERVICE_LABEL: name, names.ROUTE_LABEL: "true"},
            "ports": [{"name": "http", "port": names.API_PORT, "targetPort": names.API_PORT, "protocol": "TCP"}],
        },
    }


def endpoint(service: LLMService) -> str:
    """The URL of the API inside the cluster; the cluster's own domain is left to the resolver's search list."""
    return f"http://{service.metadata.name}.{service.metadata.namespace}.svc:{names.API_PORT}"


def config_map(resolved: Resolved, revision: str, number: int = 0) -> Manifest:
    """The group's EngineConfig document."""
    service = resolved.service
    group = group_name(service.metadata.name, revision, number)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, group, revision, number),
        "data": {names.CONFIG_KEY: json.dumps(pod_engine_config(resolved), indent=2, sort_keys=True) + "\n"},
    }


def admin_secret(service: LLMService, revision: str, operator_key: bytes, number: int = 0) -> Manifest:
    """The bearer token of the group's admin port."""
    group = group_name(service.metadata.name, revision, number)
    token = admin_token(operator_key, service.metadata.namespace, service.metadata.uid, group)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, names.admin_secret_name(group), revision, number),
        "type": "Opaque",
        "data": {names.TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def admin_token(operator_key: bytes, namespace: str, service_uid: str, group: str) -> str:
    """HMAC-SHA256 over what names the group for ever: a service made anew under an old name gets another token."""
    return hmac.new(operator_key, f"{namespace}/{service_uid}/{group}".encode(), hashlib.sha256).hexdigest()
