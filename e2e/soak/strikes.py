"""Causes the faults of a soak."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from clients.gateways import GatewayedService
from disruptions.faults import signal_process
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.shell import ClusterError
from soak.fault_plan import Fault
from soak.memory import last_line

NODE_IS_LOST_S = 90.0  # seconds for which a node is lost; longer than Kubernetes needs to notice the loss
_AT_ONCE = ("--grace-period=0", "--force")


class Strikes:
    """Faults of one service. `lost_node`: the node that faults may stop; client and operator are not on it."""

    def __init__(self, service: GatewayedService, cluster: Cluster, lost_node: str, seed: int) -> None:
        self.is_node_lost = threading.Event()
        self._service = service
        self._cluster = cluster
        self._lost_node = lost_node
        self._rng = random.Random(seed)  # nosec: not for secrets
        self._ended = threading.Event()
        self._nodes: list[threading.Thread] = []
        self._by_name: dict[str, Callable[[], None]] = {
            "a core is killed": lambda: self._signal("head", "engine", "rayloom_engine[.]core_server[.]process"),
            "a rank is killed": lambda: self._signal("worker", "ray-worker", "ray::[R]ankActor"),
            "a head pod is deleted": lambda: self._delete("head"),
            "a worker pod is deleted": lambda: self._delete("worker"),
            "a gateway is killed": lambda: self._delete("gateway"),
            "a node is lost": self._lose_node,
        }

    def strike(self, fault: Fault) -> str:
        """Causes the fault, and returns its description in words, or the reason why there was no victim."""
        try:
            self._by_name[fault.what]()
        except (ClusterError, IndexError) as error:
            return f"{fault.what}: no victim ({last_line(error)})"
        return fault.what

    def end(self) -> None:
        """Starts a lost node again."""
        self._ended.set()
        for thread in self._nodes:
            thread.join()

    def _victim(self, kind: str) -> str:
        pods = self._service.gateways() if kind == "gateway" else self._service.pods(kind)
        names: list[str] = sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return self._rng.choice(names)

    def _signal(self, kind: str, container: str, pattern: str) -> None:
        service = self._service
        signal_process(service.kubectl, service.namespace, self._victim(kind), container, pattern)

    def _delete(self, kind: str) -> None:
        self._service.delete_pod(self._victim(kind), *_AT_ONCE)

    def _lose_node(self) -> None:
        self.is_node_lost.set()
        self._cluster.stop_node(self._lost_node)
        thread = threading.Thread(target=self._return_node)
        self._nodes.append(thread)
        thread.start()

    def _return_node(self) -> None:
        self._ended.wait(NODE_IS_LOST_S)
        self._cluster.start_node(self._lost_node)
        self.is_node_lost.clear()
