"""`spec.gateway.route`: an HTTPRoute or an Ingress through which clients outside of the cluster reach the gateways.

Nothing here depends on the custom resource that has the field, so LLMService and LLMGateway share these classes.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_MAX_HOST = 253  # characters of a DNS name
_HOST = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
_HOST_IN_WORDS = "use a DNS name in lower case, without port, path and '*', such as llm.example.com"
# HTTPRoute and Ingress accept no IP address as a host name.
_ADDRESS = "[0-9.]*"
_HOST_RULE = f"self.matches('^{_HOST}$') && !self.matches('^{_ADDRESS}$')"
# Every endpoint that generates text is below this path.
DEFAULT_PATH = "/v1"
_PATH = "/|(/[A-Za-z0-9._~-]+)+"
_PATH_IN_WORDS = "a path begins with '/' and does not end with one, such as /v1; '/' alone is every path"
_PATH_RULE = f"self.matches('^({_PATH})$')"
_NAME = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_NAME_IN_WORDS = "use the name of an object: lower-case letters, digits, '-' and '.'"
_NAME_RULE = f"self.matches('^{_NAME}$')"
# A snippet becomes part of the proxy's configuration. So a snippet can read the Secrets of every Ingress.
_SNIPPET_IN_WORDS = (
    "annotations that end with '-snippet' change the proxy itself: write an Ingress of your own for them"
)
_SNIPPET_RULE = "self.all(key, !key.endsWith('-snippet') && !key.endsWith('-snippets'))"
_OWN_LABEL = "app.kubernetes.io/managed-by"
_OWN_PREFIX = "rayloom.dev/"
_LABELS_IN_WORDS = "the operator sets app.kubernetes.io/managed-by and labels of rayloom.dev itself: remove them"
_LABELS_RULE = f"self.all(key, key != '{_OWN_LABEL}' && !key.startsWith('{_OWN_PREFIX}'))"
_ONE_IN_WORDS = "give exactly one of httpRoute and ingress"
_PARENTS_IN_WORDS = "name the Gateways that take the route, 1 to 8 of them, and none twice"
_MAX_PARENTS = 8
_MAX_HOSTNAMES = 16
_HOSTNAMES_IN_WORDS = f"give 1 to {_MAX_HOSTNAMES} host names"


def _is_host(text: str) -> str:
    if not re.fullmatch(_HOST, text) or re.fullmatch(_ADDRESS, text):
        raise ValueError(f"{text!r} is not possible: {_HOST_IN_WORDS}")
    return text


def _is_path(text: str) -> str:
    if not re.fullmatch(_PATH, text):
        raise ValueError(f"{text!r} is not possible: {_PATH_IN_WORDS}")
    return text


def _is_name(text: str) -> str:
    if not re.fullmatch(_NAME, text):
        raise ValueError(f"{text!r} is not possible: {_NAME_IN_WORDS}")
    return text


def _have_no_snippets(annotations: dict[str, str]) -> dict[str, str]:
    found = sorted(key for key in annotations if key.endswith(("-snippet", "-snippets")))
    if found:
        raise ValueError(f"{', '.join(found)}: {_SNIPPET_IN_WORDS}")
    return annotations


def _are_not_ours(labels: dict[str, str]) -> dict[str, str]:
    found = sorted(key for key in labels if key == _OWN_LABEL or key.startswith(_OWN_PREFIX))
    if found:
        raise ValueError(f"{', '.join(found)}: {_LABELS_IN_WORDS}")
    return labels


Host = Annotated[
    str,
    Field(min_length=1, max_length=_MAX_HOST, json_schema_extra=rules((_HOST_RULE, _HOST_IN_WORDS))),
    AfterValidator(_is_host),
]
Name = Annotated[
    str,
    Field(min_length=1, max_length=_MAX_HOST, json_schema_extra=rules((_NAME_RULE, _NAME_IN_WORDS))),
    AfterValidator(_is_name),
]
Path = Annotated[str, AfterValidator(_is_path)]
Value = Annotated[str, Field(max_length=16384)]
LabelValue = Annotated[str, Field(max_length=63)]


class _Exposed(Part):
    """The fields that HTTPRoute and Ingress have in common."""

    path: Path = Field(
        DEFAULT_PATH,
        max_length=1024,
        description="Beginning of the paths that are routed, in whole segments. /v1 leaves out the paths beside the "
        "API, some of which need no key, such as /metrics. / publishes every path. The path is not changed on the way: "
        "below another path, set engine.args.rootPath of the LLMService, or rootPath of the LLMGateway, to it.",
        json_schema_extra=rules((_PATH_RULE, _PATH_IN_WORDS)),
    )
    annotations: Annotated[dict[str, Value], AfterValidator(_have_no_snippets)] = Field(
        default_factory=dict,
        max_length=64,
        description="Annotations of the object, such as those that the controller or cert-manager reads.",
        json_schema_extra=rules((_SNIPPET_RULE, _SNIPPET_IN_WORDS)),
    )
    labels: Annotated[dict[str, LabelValue], AfterValidator(_are_not_ours)] = Field(
        default_factory=dict,
        max_length=32,
        description="Labels of the object, such as those by which a Gateway selects routes.",
        json_schema_extra=rules((_LABELS_RULE, _LABELS_IN_WORDS)),
    )


class ParentRef(Part):
    """A Gateway, or one of its listeners."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name | None = Field(None, description="Namespace of the Gateway. Default: that of this object.")
    section_name: Name | None = Field(
        None, description="Name of the Gateway's listener. Default: every listener that takes the route."
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port of the Gateway's listeners. Default: every port.")


def _are_parents(found: tuple[ParentRef, ...]) -> tuple[ParentRef, ...]:
    if not 1 <= len(found) <= _MAX_PARENTS or len(set(found)) < len(found):
        raise ValueError(f"{len(found)} Gateways are given: {_PARENTS_IN_WORDS}")
    return found


def _are_hostnames(found: tuple[Host, ...]) -> tuple[Host, ...]:
    if not 1 <= len(found) <= _MAX_HOSTNAMES:
        raise ValueError(f"{len(found)} host names are given: {_HOSTNAMES_IN_WORDS}")
    return found


class HttpRoute(_Exposed):
    """An HTTPRoute of the Gateway API. TLS is configured in the Gateway's listener."""

    parent_refs: Annotated[tuple[ParentRef, ...], AfterValidator(_are_parents)] = Field(
        strict=False,
        description="The Gateways that take the route.",
        json_schema_extra=rules(
            ("self.size() >= 1 && self.all(one, self.exists_one(other, one == other))", _PARENTS_IN_WORDS)
        )
        | {"maxItems": _MAX_PARENTS},
    )
    hostnames: Annotated[tuple[Host, ...], AfterValidator(_are_hostnames)] = Field(
        strict=False,
        description="Host names of the URL; the status shows the first one.",
        json_schema_extra=rules(("self.size() >= 1", _HOSTNAMES_IN_WORDS)) | {"maxItems": _MAX_HOSTNAMES},
    )


class IngressRoute(_Exposed):
    """An Ingress, for controllers without the Gateway API."""

    class_name: Name | None = Field(
        None, description="Name of the IngressClass. Default: the cluster's default IngressClass."
    )
    host: Host = Field(description="Host name of the URL.")
    tls_secret_name: Name | None = Field(
        None,
        description="Name of a Secret of type kubernetes.io/tls with the certificate of the host. The operator never "
        "reads it. Left out: the Ingress asks for no TLS.",
    )


class GatewayRoute(Part):
    """Exactly one of `httpRoute` and `ingress`."""

    model_config = ConfigDict(json_schema_extra=rules(("has(self.httpRoute) != has(self.ingress)", _ONE_IN_WORDS)))

    http_route: HttpRoute | None = Field(None, description="An HTTPRoute of the Gateway API, version 1.2 or newer.")
    ingress: IngressRoute | None = Field(None, description="An Ingress.")

    @model_validator(mode="after")
    def _is_one(self) -> GatewayRoute:
        if (self.http_route is None) == (self.ingress is None):
            raise ValueError(_ONE_IN_WORDS)
        return self

    @property
    def kind(self) -> str:
        """The kind of the route's object: HTTPRoute or Ingress."""
        return "Ingress" if self.http_route is None else "HTTPRoute"

    @property
    def url(self) -> str:
        """The URL for clients outside of the cluster.

        The operator reads no Gateway, so it does not know whether a listener uses TLS. The URL begins with https://
        unless every parentRef of the HTTPRoute names port 80. The URL has the port of the first parentRef, if that
        parentRef names a port other than 80 and 443.
        """
        if self.ingress is not None:
            scheme = "http" if self.ingress.tls_secret_name is None else "https"
            return f"{scheme}://{self.ingress.host}{self.ingress.path.rstrip('/')}"
        assert self.http_route is not None
        ports = [each.port for each in self.http_route.parent_refs]
        scheme = "http" if set(ports) == {80} else "https"
        port = "" if ports[0] in (None, 80, 443) else f":{ports[0]}"
        return f"{scheme}://{self.http_route.hostnames[0]}{port}{self.http_route.path.rstrip('/')}"
