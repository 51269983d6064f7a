"""Prepares the nodes of the test cluster for the loss of a node."""

from __future__ import annotations

from clients.service import OPERATOR_NAMESPACE, READY_SECONDS, is_ready, wait
from local_kubernetes.machine.kubectl import Kubectl


def move_operator_off(kubectl: Kubectl, node: str) -> None:
    """Moves the operator off the node. Kubernetes would recreate it only minutes after the loss."""
    pods = ("get", "pods", "--namespace", OPERATOR_NAMESPACE)

    def is_elsewhere() -> bool:
        ready = [pod for pod in kubectl.json(*pods)["items"] if is_ready(pod)]
        return bool(ready) and all(pod["spec"]["nodeName"] != node for pod in ready)

    if not is_elsewhere():
        kubectl("cordon", node)
        try:
            kubectl("delete", "pods", "--all", "--namespace", OPERATOR_NAMESPACE, timeout_s=180)
            wait(is_elsewhere, READY_SECONDS, lambda: kubectl(*pods))
        finally:
            kubectl("uncordon", node)
