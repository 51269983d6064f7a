"""The TLS configuration for a gateway's connections to engines, made from the gateway's settings."""

from __future__ import annotations

from rayloom_engine.front.core_link.handshake import LinkTls
from rayloom_engine.front.gateway.gateway_config import GatewaySettings
from rayloom_engine.protocol.tls.files import TlsFiles


def link_tls(settings: GatewaySettings) -> LinkTls | None:
    """Returns the TLS configuration for all engines; None if no certificate is set. Raises ConfigError."""
    paths = settings.tls_paths
    if paths is None:
        return None
    name = settings.tls_server_name or server_name(settings.engines_dns, settings.tls_server_suffix)
    return LinkTls(TlsFiles(paths, is_server=False), settings.tls_mode == "strict", name)


def server_name(engines_dns: str | None, suffix: str) -> str:
    """Returns the name in the certificates of engines found by `engines_dns` (HOST:PORT); empty if `engines_dns` is
    None."""
    return "" if engines_dns is None else engines_dns.rpartition(":")[0].rstrip(".") + suffix
