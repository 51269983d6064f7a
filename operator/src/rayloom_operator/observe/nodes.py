"""Which nodes of the cluster are not ready, and since when; which are being emptied; and what the labels of those with
accelerators say of them. Nothing else is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from rayloom_operator.api.accelerator_memory import UNKNOWN_NODES, AcceleratorNode, NodeMemory, node_memory
from rayloom_operator.api.sizing import Accelerator
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.times import moment

# Set before pods are evicted, and not by cordoning. The last is Karpenter's up to 0.37.
_EMPTYING_TAINTS = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})


def unready_since(node: Manifest) -> datetime | None:
    """Since when a Node document says that the node is not ready; None while it is, or has never been.

    Its control plane says so itself when a node has been silent for a while (`--node-monitor-grace-period`).
    """
    conditions = node.get("status", {}).get("conditions", ())
    ready = next((each for each in conditions if each["type"] == "Ready"), None)
    if ready is None or ready["status"] == "True":
        return None
    return moment(ready.get("lastTransitionTime", ""))


def accelerators_of(node: Manifest) -> AcceleratorNode | None:
    """The node with its labels, where pods can ask it for devices; None for any other."""
    meta, allocatable = node["metadata"], node.get("status", {}).get("allocatable", {})
    # Devices have the name of their vendor before a slash; cpu, memory and huge pages have none.
    found = frozenset(name for name, number in allocatable.items() if "/" in name and number != "0")
    return AcceleratorNode(name=meta["name"], labels=meta.get("labels", {}), resources=found) if found else None


def is_cordoned(node: Manifest) -> bool:
    """Whether a Node document says that its pods are to go, or will be told to: by hand, by `kubectl drain`, or by a
    cluster's autoscaler, which taints first."""
    spec = node.get("spec", {})
    return bool(spec.get("unschedulable")) or any(each["key"] in _EMPTYING_TAINTS for each in spec.get("taints", ()))


class Nodes:
    """`on_change` gets the name of a node that became ready, or ceased to be; or is to be emptied, or no more. Lives in
    one event loop, in which `reflector` is to run; where nodes may not be listed, every node counts as ready."""

    def __init__(self, kube: Kube, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._unready: dict[str, datetime] = {}
        self._accelerators: dict[str, AcceleratorNode] = {}
        self.cordoned: set[str] = set()  # names of nodes that are being emptied
        watched = Watched(api_version="v1", kind="Node", selector={}, key_of=_key, slim=_without_all_else)
        self.reflector = Reflector(kube, watched, self._changed)

    @property
    def unready(self) -> dict[str, datetime]:
        """Names of nodes that are not ready -> since when."""
        return self._unready

    def memory_of(self, accelerator: Accelerator, node_selector: Mapping[str, str]) -> NodeMemory:
        """What the labels of the nodes say of this accelerator."""
        if not self.reflector.is_synced.is_set():
            return UNKNOWN_NODES
        return node_memory(self._accelerators.values(), accelerator, node_selector)

    def _changed(self, key: ServiceKey) -> None:
        _, name = key
        self._accelerators.pop(name, None)
        for node in self.reflector.of_service(key):
            if (found := accelerators_of(node)) is not None:
                self._accelerators[name] = found
        since = next((unready_since(node) for node in self.reflector.of_service(key)), None)
        was_ready = self._unready.pop(name, None) is None
        if since is not None:
            self._unready[name] = since
        was_cordoned, is_there = name in self.cordoned, any(map(is_cordoned, self.reflector.of_service(key)))
        (self.cordoned.add if is_there else self.cordoned.discard)(name)
        if was_ready != (since is None) or was_cordoned != is_there:
            self._on_change(name)


def _key(node: Manifest) -> ServiceKey:
    """Each node is a key of its own."""
    return "", node["metadata"]["name"]


def _without_all_else(node: Manifest) -> Manifest:
    ready = [each for each in node.get("status", {}).get("conditions", ()) if each["type"] == "Ready"]
    spec = {"unschedulable": True} if is_cordoned(node) else {}
    status: Manifest = {"conditions": ready}
    meta: Manifest = {"name": node["metadata"]["name"]}
    if (found := accelerators_of(node)) is not None:
        meta["labels"] = dict(found.labels)
        status["allocatable"] = dict.fromkeys(sorted(found.resources), "1")
    return {"metadata": meta, "spec": spec, "status": status}
