"""The Secrets of a service, and the Service with their digest."""

import base64
from dataclasses import replace

from rayloom_operator.objects.gateway.companions import engines_service, gateway_secret
from rayloom_operator.objects.secret_digest import SECRETS_ANNOTATION, has_digest
from rayloom_operator.objects.tls.certificates import PERIOD
from rayloom_operator.objects.tls.tls_secrets import service_secrets
from rt_operator import CLOCK, SETTINGS, make_resolved, make_service

TLS = replace(SETTINGS, pod_tls="strict")
BEHIND = make_resolved(gateway={"replicas": 2})


def digest(manifests):
    (found,) = [each for each in manifests if has_digest(each)]
    return found["metadata"]["annotations"][SECRETS_ANNOTATION]


def changed(secret, field):
    return secret | {"data": secret["data"] | {field: base64.b64encode(b"other").decode()}}


SERVICE = make_service(gateway={})
OPERATOR_KEY = b"k" * 16
SECRETS = (gateway_secret(SERVICE, OPERATOR_KEY), *service_secrets(SERVICE, OPERATOR_KEY, b"", CLOCK))
LATER_SECRETS = (SECRETS[0], *service_secrets(SERVICE, OPERATOR_KEY, b"", CLOCK + PERIOD))
ENGINES = engines_service(SERVICE)
