"""Memory of engines, gateways and the operator, in MiB of proportional set size (PSS)."""

from __future__ import annotations

from clients.gateways import GatewayedService
from clients.service import OPERATOR_NAMESPACE, is_ready
from local_kubernetes.machine.shell import ClusterError

# The containers of a head pod see each other's processes, so one of them counts all.
_CONTAINERS = {"head": "engine", "worker": "ray-worker"}
_SUM = "cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/ {sum += $2} END {print sum}'"


def memory(service: GatewayedService) -> dict[str, float]:
    """The mean of the ready pods of each role: engine, gateway, operator. A role without a ready pod is left out."""
    kubectl, namespace = service.kubectl, service.namespace
    by_group: dict[str, list[float]] = {}
    for kind, container in _CONTAINERS.items():
        for pod in filter(is_ready, service.pods(kind)):
            group = by_group.setdefault(pod["metadata"]["labels"]["rayloom.dev/group"], [])
            group.append(_pss(service, namespace, pod["metadata"]["name"], container))
    # An engine with a pod that is not ready is left out, because the sum would lack the memory of that pod.
    whole = [sum(parts) for parts in by_group.values() if len(parts) == len(_CONTAINERS) and min(parts) > 0]
    gateways = [_pss(service, namespace, pod["metadata"]["name"]) for pod in service.gateways() if is_ready(pod)]
    pods = kubectl.json("get", "pods", "--namespace", OPERATOR_NAMESPACE)["items"]
    operators = [_pss(service, OPERATOR_NAMESPACE, pod["metadata"]["name"]) for pod in pods if is_ready(pod)]
    found = {"engine": whole, "gateway": gateways, "operator": operators}
    return {role: sum(sizes) / len(sizes) for role, sizes in found.items() if sizes and min(sizes) > 0}


def _pss(service: GatewayedService, namespace: str, pod: str, container: str = "") -> float:
    """MiB of all processes of a container; 0 if the container has ended."""
    chosen = ("--container", container) if container else ()
    try:
        output = service.kubectl("exec", "--namespace", namespace, pod, *chosen, "--", "sh", "-c", _SUM).strip()
    except ClusterError:
        return 0.0
    return float(output or 0) / 1024
