"""Memory of engines, gateways and the operator, in MiB of proportional set size (PSS)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from clients.gateways import GatewayedService
from clients.service import OPERATOR_NAMESPACE, is_ready
from local_kubernetes.machine.shell import ClusterError

# The containers of a head pod share a process namespace, so one container measures the processes of all.
_CONTAINERS = {"head": "engine", "worker": "ray-worker"}
_SUM = "cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/ {sum += $2} END {print sum}'"

Size = float | str  # MiB, or the reason why no pod could be measured


def memory(service: GatewayedService) -> dict[str, Size]:
    """Role (engine, gateway, operator) -> mean memory of the ready members."""
    kubectl, namespace = service.kubectl, service.namespace
    by_group: dict[str, list[Size]] = {}
    for kind, container in _CONTAINERS.items():
        for pod in filter(is_ready, service.pods(kind)):
            group = by_group.setdefault(pod["metadata"]["labels"]["rayloom.dev/group"], [])
            group.append(_pss(service, namespace, pod["metadata"]["name"], container))
    gateways = [[_pss(service, namespace, pod["metadata"]["name"])] for pod in service.gateways() if is_ready(pod)]
    pods = kubectl.json("get", "pods", "--namespace", OPERATOR_NAMESPACE)["items"]
    operators = [[_pss(service, OPERATOR_NAMESPACE, pod["metadata"]["name"])] for pod in pods if is_ready(pod)]
    return {
        "engine": mean_size(list(by_group.values()), len(_CONTAINERS)),
        "gateway": mean_size(gateways),
        "operator": mean_size(operators),
    }


def mean_size(members: Sequence[Sequence[Size]], num_pods: int = 1) -> Size:
    """The mean size of members whose pods are all ready and measured. A member's size is the total of its pods. Pure.

    A member with missing pods is left out, because its size would be too small.
    """
    sums: list[float] = []
    reasons: list[str] = []
    for pods in members:
        sizes = [size for size in pods if isinstance(size, float)]
        if len(sizes) == num_pods:
            sums.append(sum(sizes))
        else:
            failed = [size for size in pods if isinstance(size, str)]
            reasons.append(failed[0] if failed else f"{len(pods)} of its {num_pods} pods are ready")
    if sums:
        return statistics.fmean(sums)
    return reasons[0] if reasons else "no pod is ready"


def _pss(service: GatewayedService, namespace: str, pod: str, container: str = "") -> Size:
    """MiB of all processes of a container, or the reason why they could not be measured."""
    chosen = ("--container", container) if container else ()
    try:
        output = service.kubectl("exec", "--namespace", namespace, pod, *chosen, "--", "sh", "-c", _SUM).strip()
    except ClusterError as error:
        return f"{pod}: {last_line(error)}"
    mib = float(output or 0) / 1024
    return mib if mib > 0 else f"{pod}: its processes cannot be read"


def last_line(error: Exception) -> str:
    """The last line of an error, at most 120 characters; its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[-1][:120] if lines else type(error).__name__
