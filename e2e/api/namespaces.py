"""Namespaces and LLMServices of tests on an API server without real nodes."""

from __future__ import annotations

import itertools
from typing import Any

from operator_processes.process import wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import ApiError

_numbers = itertools.count()


def new_namespace(world: World, purpose: str) -> str:
    """Creates a namespace, which is deleted at the end of the session even after a failed test. Returns its name."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in purpose.lower())[:40].strip("-")
    name = f"api-{slug}-{next(_numbers)}"
    world.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": {"rayloom.dev/e2e": "true"}}})
    return name


def delete_services(world: World, namespace: str) -> None:
    """Deletes all LLMServices and LLMGateways of the namespace. Returns at once.

    The namespace stays until the end of the session. The deletion of a service takes 0.3 s of CPU time, and that of a
    namespace with a service 0.7 s, because the namespace controller deletes objects that the operator and other
    controllers then try to create again.
    """
    for plural in ("llmgateways", "llmservices"):
        world.delete(f"{LLM}/namespaces/{namespace}/{plural}")


def forbid_pods(world: World, namespace: str) -> str:
    """Creates the quota no-pods. Returns its path when the API server refuses every pod because of this quota.

    The API server's quota admission has a cache of quotas. It applies a quota only after kube-controller-manager has
    counted the namespace's pods.
    """
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.request("POST", quotas, {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}})
    pod = {"metadata": {"name": "refused"}, "spec": {"containers": [{"name": "a", "image": "a"}]}}

    def is_refused() -> bool:
        try:
            world.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod, dryRun="All")
        except ApiError as error:
            return "exceeded quota: no-pods" in str(error)
        return False

    wait_until(is_refused, f"{namespace}: the quota to hold")
    return f"{quotas}/no-pods"


def llm_service(namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    """The manifest of an LLMService with the embedded model and these fields of the spec."""
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": "builtin://smollm2-135m"}, **spec},
    }
