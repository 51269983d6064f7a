"""The Secret with the bearer token of a group's admin port.

The token is derived from the operator's key, so that no secret is ever read back: a restarted operator computes it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest, group_name, labels, metadata

TOKEN_KEY = "token"


def admin_secret_name(group: str) -> str:
    return f"{group}-admin"


def admin_token(operator_key: bytes, namespace: str, service_uid: str, group: str) -> str:
    """HMAC-SHA256 over what names the group for ever: a service made anew under an old name gets another token."""
    return hmac.new(operator_key, f"{namespace}/{service_uid}/{group}".encode(), hashlib.sha256).hexdigest()


def admin_secret(service: LLMService, revision: str, operator_key: bytes) -> Manifest:
    group = group_name(service.metadata.name, revision)
    token = admin_token(operator_key, service.metadata.namespace, service.metadata.uid, group)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(service, admin_secret_name(group), labels(service, revision)),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }
