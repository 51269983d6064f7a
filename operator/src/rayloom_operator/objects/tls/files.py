"""The files for TLS in engine and gateway pods: names of the Secrets, mounts, and settings with the files' paths."""

from __future__ import annotations

from typing import Literal

from rayloom_operator import names
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.llmgateway import identity

TlsMode = Literal["off", "permissive", "strict"]

FOLDER = f"{names.CONFIG_FOLDER}/tls"
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"  # the keys of Secrets of type kubernetes.io/tls


def engines_secret_name(service: LLMService) -> str:
    """Returns the name of the Secret with the certificate of a service's engines."""
    return names.secret_name(f"{names.engines_name(service.metadata.name)}-tls", service.metadata.uid)


def gateway_secret_name(service: LLMService) -> str:
    """Returns the name of the Secret with the certificate of a service's gateway pods."""
    return names.secret_name(f"{names.gateway_name(service.metadata.name)}-tls", service.metadata.uid)


def llmgateway_secret_name(gateway: LLMGateway) -> str:
    """Returns the name of the Secret with the certificate of an LLMGateway's pods."""
    return names.secret_name(f"{identity.object_name(gateway.metadata.name)}-tls", gateway.metadata.uid)


def tls_source(name: str) -> Manifest:
    """Returns the files of this Secret, as a source for the projected volume with the configuration."""
    items = [{"key": key, "path": f"tls/{key}"} for key in (CERT, KEY, CA)]
    return {"secret": {"name": name, "items": items}}


def engine_tls() -> dict[str, str]:
    """The fields of an EngineConfig for TLS at the port for gateways.

    Clear text is accepted, too, so that a change of `podTLS` does not require new engines. A gateway that demands TLS
    never sends clear text.
    """
    return {**_files("front_tls"), "front_tls_mode": "permissive"}


def gateway_tls(mode: TlsMode, namespace: str) -> dict[str, str]:
    """The fields of a GatewayConfig for TLS to the engines of a namespace."""
    if mode == "off":
        return {}
    return {**_files("tls"), "tls_mode": mode, "tls_server_suffix": f".{namespace}.svc"}


def _files(prefix: str) -> dict[str, str]:
    return {
        f"{prefix}_cert_file": f"{FOLDER}/{CERT}",
        f"{prefix}_key_file": f"{FOLDER}/{KEY}",
        f"{prefix}_ca_file": f"{FOLDER}/{CA}",
    }
