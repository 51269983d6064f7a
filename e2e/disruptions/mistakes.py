"""Services that cannot serve because of a missing object or too little memory, and the removal of each cause."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.service import ROOT, manifest
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.clusters.kind import KindCluster
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.images.build import ENGINE, OPERATOR, docker
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import Place
from local_kubernetes.machine.shell import run


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """The condition of a service with the mistake, and the number of the service's pods. No pod is created twice."""

    reason: str
    said: tuple[str, ...]  # parts of the message: the problem and the solution
    num_pods: int


MISTAKES = {
    "image": Mistake(
        reason="ImagePullFailed",
        said=("rayloom/engine:not-there-yet cannot be pulled", "Check spec.engine.image"),
        num_pods=2,
    ),
    "folder": Mistake(
        reason="ModelNotFound",
        said=("/var/tmp/rayloom-e2e-not-there-yet", "Put the model at this path"),
        num_pods=2,
    ),
    "room": Mistake(
        reason="Unschedulable",
        said=("finds no node", "Insufficient memory", "Add nodes, or lower spec.engine.resources"),
        num_pods=3,
    ),
}
IMAGE = "docker.io/rayloom/engine:not-there-yet"
FOLDER = Path("/var/tmp/rayloom-e2e-not-there-yet")
FILLER = "filler"
# The share of a node's memory that the filler requests. Each of the two ranks of the service "room" requests the same
# share, so only one of the ranks fits.
_MORE_THAN_HALF = 0.6


def services(kubectl: Kubectl, namespace: str) -> list[dict[str, Any]]:
    """An LLMService for each mistake, and a pod whose memory request leaves too little for the last service."""
    node = kubectl.json("get", "nodes")["items"][0]
    much = f"{int(_kibibytes(node['status']['allocatable']['memory']) * _MORE_THAN_HALF)}Ki"
    little = {"resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}
    large = {"resources": {"requests": {"cpu": "100m", "memory": much}}}
    image = {"image": IMAGE.removeprefix("docker.io/")}
    found = {
        "image": _example("smollm2", namespace, engine=little | image),
        "folder": _example("smollm2", namespace, engine=little, model={"source": f"file://{FOLDER}"}),
        "room": _example("smollm2-pp2", namespace, engine=large),
    }
    for name, service in found.items():
        service["metadata"]["name"] = name
    container = {
        "name": "filler",
        "image": OPERATOR.name.removeprefix("docker.io/"),
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"memory": much}},
    }
    filler: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": FILLER, "namespace": namespace},
        "spec": {"containers": [container], "nodeName": node["metadata"]["name"], "terminationGracePeriodSeconds": 0},
    }
    return [filler, *found.values()]


def _example(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return manifest(ROOT / "examples" / f"{name}.yaml", namespace, **spec)


def _kibibytes(amount: str) -> int:
    assert amount.endswith("Ki"), amount
    return int(amount.removesuffix("Ki"))


@contextmanager
def image_on_the_nodes(cluster: Cluster) -> Iterator[None]:
    """Gives the engine's image the additional name IMAGE on every node, until the block ends."""
    for node in cluster.node_names():
        run(*_containerd(cluster, node), "images", "tag", "--force", ENGINE.name, IMAGE)
    try:
        yield
    finally:
        for node in cluster.node_names():
            run(*_containerd(cluster, node), "images", "remove", IMAGE)


def _containerd(cluster: Cluster, node: str) -> tuple[object, ...]:
    if isinstance(cluster, KindCluster):
        return docker(), "exec", node, "ctr", "--namespace", "k8s.io"
    if not isinstance(cluster, LocalCluster):
        pytest.skip("the nodes' images are not ours to change")
    return "ctr", "--address", Place.of().node(node).socket, "--namespace", "k8s.io"


def too_little_memory(namespace: str) -> list[dict[str, Any]]:
    """A LimitRange and a service. The LimitRange's default memory limit applies to every container without a limit.

    The limit suffices for the head pod. In a worker pod the limit suffices for Ray and a rank, but not for the rank's
    weights.
    """
    item = {"type": "Container", "default": {"memory": "720Mi"}}
    limit = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "small", "namespace": namespace},
        "spec": {"limits": [item]},
    }
    service = _example(
        "smollm2",
        namespace,
        model={"source": "builtin://smollm2-135m", "dtype": "float32"},
        engine={"resources": {"requests": {"cpu": "250m", "memory": "512Mi"}}},
        recovery={"restartBudget": 1, "backoffBaseSeconds": 10},
    )
    return [limit, service]


def remove_folder() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


class PodCounter:
    """Watches the pods, and counts for each service how many were created."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        path = r'{.metadata.uid} {.metadata.labels.rayloom\.dev/service} {.metadata.labels.ray\.io/cluster}{"\n"}'
        command = ("get", "pods", "--namespace", namespace, "--watch", f"--output=jsonpath={path}")
        self._process = kubectl.start(*command)
        self._seen: set[tuple[str, ...]] = set()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen.add(tuple(line.split()))

    def by_service(self) -> dict[str, int]:
        """Service -> number of created pods of its RayClusters."""
        return Counter(row[1] for row in set(self._seen) if len(row) == 3)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
