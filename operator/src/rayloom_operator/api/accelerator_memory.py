"""How much memory an accelerator has, where the manifest leaves it to the labels of the nodes. Pure.

GPU feature discovery labels nodes by the name of the resource: `nvidia.com/gpu.memory` is in MiB,
`nvidia.com/gpu.replicas` says among how many pods each device is shared, and a MIG profile's resource has labels of its
own in the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayloom_operator.api.sizing import Accelerator

_MIB = 1 << 20
# A label is anybody's who may change nodes. What is computed from it is to fit into 64 bits of a status.
MAX_MIB = 1 << 40
_MAX_DIGITS = len(str(MAX_MIB))
_GIVE_IT = "give spec.accelerator.memory, such as 80Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorNode:
    """A node with devices that pods ask for by name."""

    name: str
    labels: Mapping[str, str]
    resources: frozenset[str]  # names of resources of which it has one or more


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes of one accelerator, or None and why they are not known."""

    num_bytes: int | None
    why_not: str = ""


WITHOUT_CLUSTER = NodeMemory(None, f"without a cluster nothing says how much memory it has: {_GIVE_IT}")
UNKNOWN_NODES = NodeMemory(None, f"the operator does not know the cluster's nodes, or not yet: {_GIVE_IT}")


def asked_of(accelerator: Accelerator, node_selector: Mapping[str, str]) -> str:
    """A key for the set of nodes whose labels were read; the stored value is valid while the key is equal."""
    return ",".join([accelerator.resource, *(f"{name}={value}" for name, value in sorted(node_selector.items()))])


def node_memory(
    nodes: Iterable[AcceleratorNode], accelerator: Accelerator, node_selector: Mapping[str, str]
) -> NodeMemory:
    """The least memory of all nodes that could hold a pod of the service.

    One node without the label leaves it open: the pod might land there.
    """
    resource = accelerator.resource
    wanted = node_selector.items()
    candidates = sorted(
        (node for node in nodes if resource in node.resources and wanted <= node.labels.items()),
        key=lambda node: node.name,
    )
    if not candidates:
        where = f"has {resource} and the labels of scheduling.nodeSelector" if node_selector else f"has {resource}"
        return NodeMemory(None, f"no node {where}: add one, or {_GIVE_IT}")
    label = f"{resource}.memory"
    silent = [node.name for node in candidates if _mebibytes(node.labels.get(label, "")) is None]
    if silent:
        more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
        return NodeMemory(
            None,
            f"node {silent[0]}{more} has {resource} and no label {label}, which GPU feature discovery sets: install "
            f"it, or {_GIVE_IT}",
        )
    shared = [node.name for node in candidates if node.labels.get(f"{resource}.replicas", "1") not in ("0", "1")]
    if shared:
        return NodeMemory(
            None,
            f"node {shared[0]} shares each {resource} among several pods ({resource}.replicas), so its label {label} "
            f"is not what one may use: {_GIVE_IT}",
        )
    return NodeMemory(min(_mebibytes(node.labels[label]) or 0 for node in candidates) * _MIB)


def _mebibytes(text: str) -> int | None:
    """The value of a label; None where it is no amount that a device can have."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if 0 < number <= MAX_MIB else None
