"""Reads the memory of an accelerator from node labels if a manifest leaves out spec.accelerator.memory. Pure.

GPU feature discovery names its labels after the resource. `nvidia.com/gpu.memory` is the memory in MiB, and
`nvidia.com/gpu.replicas` the number of pods that share each device. The resource of a MIG profile has such labels too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayloom_operator.api.sizing import Accelerator

_MIB = 1 << 20
# Anybody who may change nodes can set such a label. The limit keeps the bytes computed from a label within 64 bits.
MAX_MIB = 1 << 40
_MAX_DIGITS = len(str(MAX_MIB))
_CURE = "give spec.accelerator.memory, such as 80Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorNode:
    """A node that offers extended resources."""

    name: str
    labels: Mapping[str, str]
    resources: frozenset[str]  # names of the extended resources that the node has


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The bytes of one accelerator. If they are unknown, `num_bytes` is None, and `why_not` gives the reason."""

    num_bytes: int | None
    why_not: str = ""


WITHOUT_CLUSTER = NodeMemory(None, f"without a cluster there are no node labels to read it from: {_CURE}")
UNKNOWN_NODES = NodeMemory(None, f"the operator has not listed the cluster's nodes (yet): {_CURE}")


def node_set_key(accelerator: Accelerator, node_selector: Mapping[str, str]) -> str:
    """Returns a key for the nodes whose labels give the memory.

    A stored memory stays valid while the key is the same.
    """
    return ",".join([accelerator.resource, *(f"{name}={value}" for name, value in sorted(node_selector.items()))])


def node_memory(
    nodes: Iterable[AcceleratorNode], accelerator: Accelerator, node_selector: Mapping[str, str]
) -> NodeMemory:
    """Returns the smallest accelerator memory of all nodes that could run a pod of the service.

    The memory is unknown if one of these nodes lacks the label, because the pod might be scheduled on that node.
    """
    resource = accelerator.resource
    required_labels = node_selector.items()
    candidates = sorted(
        (node for node in nodes if resource in node.resources and required_labels <= node.labels.items()),
        key=lambda node: node.name,
    )
    if not candidates:
        where = f"has {resource} and the labels of scheduling.nodeSelector" if node_selector else f"has {resource}"
        return NodeMemory(None, f"no node {where}: add one, or {_CURE}")
    label = f"{resource}.memory"
    unlabelled = [node.name for node in candidates if _mebibytes(node.labels.get(label, "")) is None]
    if unlabelled:
        more = f" (and {len(unlabelled) - 1} more)" if len(unlabelled) > 1 else ""
        return NodeMemory(
            None,
            f"node {unlabelled[0]}{more} has {resource} and no label {label}, which GPU feature discovery sets: "
            f"install it, or {_CURE}",
        )
    shared = [node.name for node in candidates if node.labels.get(f"{resource}.replicas", "1") not in ("0", "1")]
    if shared:
        return NodeMemory(
            None,
            f"node {shared[0]} shares each {resource} among several pods ({resource}.replicas), so its label {label} "
            f"gives more memory than a single pod may use: {_CURE}",
        )
    return NodeMemory(min(_mebibytes(node.labels[label]) or 0 for node in candidates) * _MIB)


def _mebibytes(text: str) -> int | None:
    """Parses the value of a label. Returns None if the value is no whole number from 1 to MAX_MIB."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if 0 < number <= MAX_MIB else None
