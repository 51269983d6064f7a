"""The nodes that are not ready, the cordoned nodes, and the labels of nodes with accelerators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from rayloom_operator.api.accelerator_memory import UNKNOWN_NODES, AcceleratorNode, NodeMemory, node_memory
from rayloom_operator.api.sizing import Accelerator
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.times import moment

# Autoscalers set these taints before they evict pods, instead of cordoning the node. Karpenter up to 0.37 sets the last
# of these taints.
_EMPTYING_TAINTS = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})


def readiness(node: Manifest) -> tuple[bool, datetime] | None:
    """Returns whether the node is ready, and since when; None if it has no condition Ready.

    The control plane changes the condition of a node that has not reported for `--node-monitor-grace-period`.
    """
    conditions = node.get("status", {}).get("conditions", ())
    ready = next((each for each in conditions if each["type"] == "Ready"), None)
    return None if ready is None else (ready["status"] == "True", moment(ready.get("lastTransitionTime", "")))


def accelerators_of(node: Manifest) -> AcceleratorNode | None:
    """Returns the labels and devices of a node; None if the node has no devices that pods can request."""
    meta, allocatable = node["metadata"], node.get("status", {}).get("allocatable", {})
    # The resource name of a device begins with its vendor and a slash. The names of cpu, memory and huge pages do not.
    found = frozenset(name for name, number in allocatable.items() if "/" in name and number != "0")
    return AcceleratorNode(name=meta["name"], labels=meta.get("labels", {}), resources=found) if found else None


def is_cordoned(node: Manifest) -> bool:
    """Returns whether the node is marked unschedulable, or has a taint with which an autoscaler announces evictions."""
    spec = node.get("spec", {})
    return bool(spec.get("unschedulable")) or any(each["key"] in _EMPTYING_TAINTS for each in spec.get("taints", ()))


class Nodes:
    """The cluster's nodes, as a watch reports them: their readiness, cordons and accelerator labels.

    Not thread-safe: the caller runs `reflector` in the event loop that calls the methods. `on_change` is called with
    the name of a node that was cordoned or uncordoned, or whose readiness or `lost_at` changed. Without the right to
    list nodes, every node counts as ready.
    """

    def __init__(self, kube: Kube, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self.unready: dict[str, datetime] = {}  # name of a node -> time at which it ceased to be ready
        self._ready: dict[str, datetime] = {}  # name of a node -> time at which it became ready
        self._accelerators: dict[str, AcceleratorNode] = {}
        self.cordoned: set[str] = set()  # names of cordoned nodes
        watched = Watched(api_version="v1", kind="Node", selector={}, key_of=_key, slim=_slim)
        self.reflector = Reflector(kube, watched, self._changed)

    def lost_at(self, name: str, patience: timedelta) -> datetime | None:
        """Returns the time from which an unready node counts as lost: `patience` after it ceased to be ready.

        Returns None if the node is ready, or if no node of the cluster is ready. In the second case the fault is
        probably not in the nodes: the certificates of all kubelets may have expired, for example. The pods may still
        serve, and could not be recreated on another node. Kubernetes evicts no pods in this case either. Once a node
        is ready again, the other nodes get the whole time again.
        """
        since = self.unready.get(name)
        if since is None or not self._ready:
            return None
        return max(since, min(self._ready.values())) + patience

    def memory_of(self, accelerator: Accelerator, node_selector: Mapping[str, str]) -> NodeMemory:
        """Returns this accelerator's memory as given by the labels of the nodes that match `node_selector`."""
        if not self.reflector.is_synced.is_set():
            return UNKNOWN_NODES
        return node_memory(self._accelerators.values(), accelerator, node_selector)

    def _changed(self, key: ServiceKey) -> None:
        _, name = key
        node = next(iter(self.reflector.of_service(key)), None)
        accelerator = accelerators_of(node) if node is not None else None
        if accelerator is None:
            self._accelerators.pop(name, None)
        else:
            self._accelerators[name] = accelerator
        had_ready = bool(self._ready)
        has_turned = self._note_readiness(name, None if node is None else readiness(node))
        if self._note_cordoned(name, is_cordoned=node is not None and is_cordoned(node)) or has_turned:
            self._on_change(name)
        if had_ready != bool(self._ready):
            # `lost_at` of all unready nodes has changed. Without this call, services with pods only on these nodes
            # would notice the change at their next regular reconcile, which may be minutes away.
            for each in self.unready.keys() - {name}:
                self._on_change(each)

    def _note_readiness(self, name: str, found: tuple[bool, datetime] | None) -> bool:
        """Records the node's `readiness`; None: it is gone, or counts as ready.

        Returns True if the node has become ready or unready.
        """
        was_unready = self.unready.pop(name, None) is not None
        self._ready.pop(name, None)
        if found is not None:
            is_ready, since = found
            (self._ready if is_ready else self.unready)[name] = since
        return was_unready != (name in self.unready)

    def _note_cordoned(self, name: str, *, is_cordoned: bool) -> bool:
        """Records whether the node is cordoned. Returns True if the record changes."""
        was_cordoned = name in self.cordoned
        if is_cordoned:
            self.cordoned.add(name)
        else:
            self.cordoned.discard(name)
        return was_cordoned != is_cordoned


def _key(node: Manifest) -> ServiceKey:
    """Returns the key of a node in the reflector. The key names no service, because nodes belong to no service."""
    return "", node["metadata"]["name"]


def _slim(node: Manifest) -> Manifest:
    """Returns a Node document without images and addresses, which are most of the document."""
    ready = [each for each in node.get("status", {}).get("conditions", ()) if each["type"] == "Ready"]
    spec = {"unschedulable": True} if is_cordoned(node) else {}
    status: Manifest = {"conditions": ready}
    meta: Manifest = {"name": node["metadata"]["name"]}
    if (found := accelerators_of(node)) is not None:
        meta["labels"] = dict(found.labels)
        status["allocatable"] = dict.fromkeys(sorted(found.resources), "1")
    return {"metadata": meta, "spec": spec, "status": status}
