"""The ServiceAccount of the engine's pods. It has no rights, and no pod gets its token."""

from __future__ import annotations

from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest, metadata, service_labels


def service_account(service: LLMService) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, service.metadata.name, service_labels(service)),
        "automountServiceAccountToken": False,
    }
