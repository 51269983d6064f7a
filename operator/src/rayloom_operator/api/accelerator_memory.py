"""Reads the memory of an accelerator from node labels, for manifests that leave out spec.accelerator.memory. Pure.

GPU feature discovery names its labels after the resource: `nvidia.com/gpu.memory` is in MiB, `nvidia.com/gpu.replicas`
is the number of pods that share each device, and the resource of a MIG profile has labels of the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayloom_operator.api.sizing import Accelerator

_MIB = 1 << 20
# Any user with the right to change nodes can set a label. Bytes computed from it must fit into 64 bits of a status.
MAX_MIB = 1 << 40
_MAX_DIGITS = len(str(MAX_MIB))
_CURE = "give spec.accelerator.memory, such as 80Gi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorNode:
    """A node with extended resources, which pods request by name."""

    name: str
    labels: Mapping[str, str]
    resources: frozenset[str]  # names of resources of which the node has one or more


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes of one accelerator; None where they are unknown, with the reason in `why_not`."""

    num_bytes: int | None
    why_not: str = ""


WITHOUT_CLUSTER = NodeMemory(None, f"without a cluster there are no node labels to read it from: {_CURE}")
UNKNOWN_NODES = NodeMemory(None, f"the operator has not listed the cluster's nodes (yet): {_CURE}")


def node_set_key(accelerator: Accelerator, node_selector: Mapping[str, str]) -> str:
    """The key of a set of nodes whose labels were read. A stored memory stays valid while its key is the same."""
    return ",".join([accelerator.resource, *(f"{name}={value}" for name, value in sorted(node_selector.items()))])


def node_memory(
    nodes: Iterable[AcceleratorNode], accelerator: Accelerator, node_selector: Mapping[str, str]
) -> NodeMemory:
    """The least memory of all nodes that could run a pod of the service.

    The memory is unknown if one of these nodes lacks the label, because the pod might be scheduled there.
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
            f"is more than one pod may use: {_CURE}",
        )
    return NodeMemory(min(_mebibytes(node.labels[label]) or 0 for node in candidates) * _MIB)


def _mebibytes(text: str) -> int | None:
    """The number in a label; None unless it is a whole number of MiB from 1 to MAX_MIB."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if 0 < number <= MAX_MIB else None
