"""Checks whether the operator's settings allow the privileges that an LLMService asks for. Pure.

A user who may create LLMServices, but perhaps no pods, gets pods through LLMServices. By default, such a pod may do no
more than a pod in a namespace with the pod security standard `restricted`. Settings of the operator may allow more. The
API server does not know these settings, so it accepts a manifest that needs more than the settings allow. The operator
reports such a manifest in a condition. Existing engine replicas stay, but none is recreated while the spec is not
allowed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.api.pod_template.privileges import host_paths, privileges, variables
from rayloom_operator.api.spec import LLMService
from rayloom_operator.errors import NotAllowed

_HOST_PATHS = (
    "use an hf:// or pvc:// source and a persistentVolumeClaim, or ask the operator's administrator to set "
    "allowHostPaths"
)

NO_ROUTES = (
    "This operator makes no HTTPRoutes and Ingresses: remove the route, or let whoever runs the operator set "
    "routes.allow."
)
_NGINX = "nginx.ingress.kubernetes.io/"
# Annotations that are safe: none makes an Ingress read a Secret, take over another host, or write into the proxy's
# configuration. `proxy-*` is missing because proxy-ssl-secret names a Secret of any namespace.
SAFE_ANNOTATIONS = (
    "cert-manager.io/cluster-issuer",
    "cert-manager.io/issuer",
    f"{_NGINX}force-ssl-redirect",
    f"{_NGINX}proxy-body-size",
    f"{_NGINX}proxy-buffer-size",
    f"{_NGINX}proxy-buffering",
    f"{_NGINX}proxy-connect-timeout",
    f"{_NGINX}proxy-read-timeout",
    f"{_NGINX}proxy-request-buffering",
    f"{_NGINX}proxy-send-timeout",
    f"{_NGINX}ssl-redirect",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Settings of the operator. By default, they allow only what restricted pod security allows."""

    host_paths: tuple[str, ...] = ()  # folders of nodes that pods may mount, with all subfolders; "/" allows every path
    hub_endpoints: bool = False  # the user's hub token may be sent to an HF_ENDPOINT that the manifest sets
    # Privileges that spec.podTemplate may ask for: keys of `pod_template.privileges.PRIVILEGES`, and Linux
    # capabilities.
    allowed_in_pod_templates: frozenset[str] = frozenset()
    # Whether HTTPRoutes and Ingresses may lead to gateways. `check` ignores routes: a service whose route is not
    # allowed still gets its engines, and `decide.route` refuses only the route.
    routes: bool = True
    # Keys of annotations that an Ingress may have. A key that ends with * allows every key with that beginning.
    route_annotations: tuple[str, ...] = SAFE_ANNOTATIONS

    def check(self, service: LLMService) -> None:
        """Raises NotAllowed, which lists every field that is not allowed, and what to change."""
        found = (*self._host_path_problems(service), *self._hub_problems(service), *self._privilege_problems(service))
        if found:
            raise NotAllowed(found)

    def route_problem(self, route: GatewayRoute) -> str:
        """Returns a message that names the forbidden parts of a route and what to change; empty if the whole route is
        allowed.
        """
        if not self.routes:
            return NO_ROUTES
        # Only Ingresses are checked: controllers of the Gateway API are configured by objects of their own, and not by
        # annotations of HTTPRoutes.
        given = {} if route.ingress is None else route.ingress.annotations
        refused = sorted(key for key in given if not any(_matches(key, each) for each in self.route_annotations))
        if not refused:
            return ""
        return (
            f"route.ingress.annotations: this operator does not allow {', '.join(refused)}, because annotations may "
            "change the proxy for other hosts: remove them, write an Ingress of your own, or let whoever runs the "
            "operator add the keys to routes.annotations."
        )

    def _host_path_problems(self, service: LLMService) -> Iterator[str]:
        model = service.spec.model
        if model.source_kind == "file":
            yield from self._path_problem("spec.model.source", model.source.removeprefix("file://"))
        if model.draft is not None and model.draft.source_kind == "file":
            yield from self._path_problem("spec.model.draft.source", model.draft.source.removeprefix("file://"))
        if model.cache is not None and model.cache.host_path is not None:
            yield from self._path_problem("spec.model.cache.hostPath", model.cache.host_path)
        for number, adapter in enumerate(model.adapters or ()):
            if adapter.host_folder is not None:
                yield from self._path_problem(f"spec.model.adapters[{number}].source", adapter.host_folder)
        for field, path in host_paths(service.spec.pod_template):
            yield from self._path_problem(field, path)

    def _path_problem(self, field: str, path: str) -> Iterator[str]:
        # The kubelet refuses a path with ".." as well.
        if ".." in path.split("/"):
            yield f"{field}: {path!r} has '..' in it; give the path without it"
        elif not path.startswith("/"):
            yield f"{field}: {path!r} is no path on nodes; give one that begins with /"
        elif not self.host_paths:
            yield f"{field}: {path!r} is a path on nodes, and this operator allows none: {_HOST_PATHS}"
        elif not any(_is_below(path, folder) for folder in self.host_paths):
            allowed = ", ".join(self.host_paths)
            yield f"{field}: {path!r} is a path on nodes, and this operator allows only {allowed}: {_HOST_PATHS}"

    def _hub_problems(self, service: LLMService) -> Iterator[str]:
        if self.hub_endpoints or service.spec.model.token_secret_ref is None:
            return
        of_engine = (
            (f"spec.engine.env[{number}]", variable.value)
            for number, variable in enumerate(service.spec.engine.env)
            if variable.name == "HF_ENDPOINT"
        )
        for field, value in (*of_engine, *variables(service.spec.pod_template, "HF_ENDPOINT")):
            yield (
                f"{field}: the token of tokenSecretRef would be sent to HF_ENDPOINT {value!r}: remove one of the two, "
                "or let whoever runs the operator set hub.endpoint, or hub.allowOwnEndpoints"
            )

    def _privilege_problems(self, service: LLMService) -> Iterator[str]:
        allowed = ", ".join(sorted(self.allowed_in_pod_templates)) or "nothing of the kind"
        for field, privilege in privileges(service.spec.pod_template):
            if privilege not in self.allowed_in_pod_templates:
                yield (
                    f"{field}: this needs {privilege}, and this operator allows {allowed}: remove it, or let whoever "
                    f"runs the operator add {privilege} to podTemplate.allow"
                )


def _matches(key: str, allowed: str) -> bool:
    return key.startswith(allowed[:-1]) if allowed.endswith("*") else key == allowed


def _is_below(path: str, folder: str) -> bool:
    """Returns whether `path` is `folder` or below it; "/models2" is not below "/models"."""
    inner, outer = (posixpath.normpath("/" + each.strip("/")) for each in (path, folder))
    return outer == "/" or inner == outer or inner.startswith(outer + "/")
