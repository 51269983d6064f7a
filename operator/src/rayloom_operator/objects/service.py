"""The Service that clients use. It selects the head pods to which the operator routes, whatever their revision."""

from __future__ import annotations

from rayloom_operator.api import LLMService
from rayloom_operator.names import API_PORT, ROUTE_LABEL, SERVICE_LABEL, Manifest, metadata, service_labels


def service(owner: LLMService) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, owner.metadata.name, service_labels(owner)),
        "spec": {
            "selector": {SERVICE_LABEL: owner.metadata.name, ROUTE_LABEL: "true"},
            "ports": [{"name": "http", "port": API_PORT, "targetPort": API_PORT, "protocol": "TCP"}],
        },
    }


def endpoint(owner: LLMService) -> str:
    """The URL of the API inside the cluster; the cluster's own domain is left to the resolver's search list."""
    return f"http://{owner.metadata.name}.{owner.metadata.namespace}.svc:{API_PORT}"
