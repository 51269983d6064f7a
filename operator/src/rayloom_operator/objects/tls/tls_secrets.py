"""The Secrets with the certificates of engines and gateway pods. The operator renews them while the pods run."""

from __future__ import annotations

from datetime import datetime

from rayloom_operator import names
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest, metadata
from rayloom_operator.objects.gateway.companions import secret
from rayloom_operator.objects.llmgateway import identity
from rayloom_operator.objects.tls.certificates import CertificateFiles, Owner, certificate_files
from rayloom_operator.objects.tls.files import (
    CA,
    CERT,
    KEY,
    engines_secret_name,
    gateway_secret_name,
    llmgateway_secret_name,
)


def service_secrets(
    service: LLMService, operator_key: bytes, previous_key: bytes, now: datetime
) -> tuple[Manifest, Manifest]:
    """The Secrets of a service's engines and gateway pods, with the certificates of the current period."""
    meta = service.metadata
    engine = Owner("engine", _full_name(names.engines_name(meta.name), meta.namespace), meta.uid)
    gateway = Owner("gateway", _full_name(names.gateway_name(meta.name), meta.namespace), meta.uid)
    return (
        _secret(
            metadata(service, engines_secret_name(service)),
            certificate_files(operator_key, previous_key, engine, now),
        ),
        _secret(
            metadata(service, gateway_secret_name(service)),
            certificate_files(operator_key, previous_key, gateway, now),
        ),
    )


def llmgateway_secret(gateway: LLMGateway, operator_key: bytes, previous_key: bytes, now: datetime) -> Manifest:
    """The Secret of an LLMGateway's pods, with the certificate of the current period."""
    meta = gateway.metadata
    owner = Owner("gateway", _full_name(identity.object_name(meta.name), meta.namespace), meta.uid)
    files = certificate_files(operator_key, previous_key, owner, now)
    return _secret(identity.metadata(gateway, llmgateway_secret_name(gateway)), files)


def _full_name(name: str, namespace: str) -> str:
    return f"{name}.{namespace}.svc"


def _secret(meta: Manifest, files: CertificateFiles) -> Manifest:
    labels = {**meta["labels"], names.RENEWED_LABEL: "true"}
    content = {CERT: files.cert, KEY: files.key, CA: files.ca}
    return {**secret({**meta, "labels": labels}, content), "type": "kubernetes.io/tls"}
