"""Builds the ServiceAccount and the Service of an LLMService, and the ConfigMap and the Secret of each engine replica.

The token of an engine's admin port is derived from the operator's key. So a restarted operator can compute the token,
and need not read the Secret.
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
    """The ServiceAccount of the engine's pods. It has no permissions, and its token is not mounted."""
    name = names.account_name(service.metadata.name)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name),
        "automountServiceAccountToken": False,
    }


def client_service(service: LLMService) -> Manifest:
    """The Service for clients. It selects head pods of any revision that carry the operator's route label."""
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
    """The URL of the API inside the cluster. The cluster's domain is left out: the resolver's search list adds it."""
    return f"http://{service.metadata.name}.{service.metadata.namespace}.svc:{names.API_PORT}"


def config_map(resolved: Resolved, revision: str, number: int = 0) -> Manifest:
    """The ConfigMap with the EngineConfig document of one engine replica."""
    service = resolved.service
    group = group_name(service.metadata.name, revision, number)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, group, revision, number),
        "data": {names.CONFIG_KEY: json.dumps(pod_engine_config(resolved), indent=2, sort_keys=True) + "\n"},
    }


def admin_secret(service: LLMService, revision: str, operator_key: bytes, number: int = 0) -> Manifest:
    """The Secret with the bearer token of one engine replica's admin port."""
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
    """HMAC-SHA256 of namespace, uid and replica name. A recreated LLMService has another uid, and so other tokens."""
    return hmac.new(operator_key, f"{namespace}/{service_uid}/{group}".encode(), hashlib.sha256).hexdigest()
