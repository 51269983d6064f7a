"""Installs and removes the real CRD of the Gateway API's kind HTTPRoute, which the cluster has only in some tests."""

from __future__ import annotations

from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.parts.build import gateway_crds
from operator_processes.process import wait_until
from real_api_server.world import World

_ROUTES = "/apis/gateway.networking.k8s.io/v1/httproutes"


def definition() -> str:
    """The path of the CRD's file."""
    return str(gateway_crds() / "gateway.networking.k8s.io_httproutes.yaml")


def install(world: World, kubectl: Kubectl) -> None:
    """Installs the CRD. Returns when the API server serves the kind, shortly after the CRD is established."""
    kubectl("apply", "--server-side", "--filename", definition())
    wait_until(lambda: world.get(_ROUTES), "the kind HTTPRoute")


def remove(kubectl: Kubectl) -> None:
    """Removes the CRD and waits until it no longer exists: a CRD that is applied during its deletion would be lost."""
    kubectl("delete", "--ignore-not-found", "--filename", definition(), "--timeout=120s", timeout_s=130)
