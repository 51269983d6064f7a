"""What somebody needs who was not there: objects, events and logs of a cluster as files."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from cluster.shell import ClusterError

# Secrets are left out on purpose.
_KINDS = (
    "llmservices",
    "rayclusters",
    "pods",
    "deployments",
    "services",
    "endpointslices",
    "configmaps",
    "nodes",
)
_NUM_LOG_LINES = 5000


def dump_cluster(cluster: Cluster, folder: Path) -> None:
    """Writes into `folder`, which is made. What cannot be had says why in its file; nothing is raised for it."""
    kubectl = Kubectl(cluster.kubeconfig)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in _KINDS:
        _write(folder / f"{kind}.yaml", kubectl, "get", kind, "--all-namespaces", "--output", "yaml")
    _write(folder / "pods.txt", kubectl, "get", "pods", "--all-namespaces", "--output", "wide")
    _write(folder / "events.txt", kubectl, "get", "events", "--all-namespaces", "--sort-by", ".lastTimestamp")
    try:
        pods = kubectl.json("get", "pods", "--all-namespaces")["items"]
    except ClusterError:
        pods = []
    for pod in pods:
        _dump_pod(kubectl, pod["metadata"]["namespace"], pod["metadata"]["name"], folder / "pods")
    for log in cluster.logs():
        (folder / "cluster").mkdir(exist_ok=True)
        shutil.copyfile(log, folder / "cluster" / log.name)


def _dump_pod(kubectl: Kubectl, namespace: str, name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    target = ("--namespace", namespace, name)
    _write(folder / f"{namespace}.{name}.txt", kubectl, "describe", "pod", *target)
    options = ("--all-containers", "--prefix", "--timestamps", f"--tail={_NUM_LOG_LINES}", "--ignore-errors")
    _write(folder / f"{namespace}.{name}.log", kubectl, "logs", *target, *options)
    previous = folder / f"{namespace}.{name}.previous.log"
    _write(previous, kubectl, "logs", *target, *options, "--previous")


def _write(path: Path, kubectl: Kubectl, *arguments: str) -> None:
    try:
        content = kubectl(*arguments)
    except ClusterError as error:
        content = f"{error}\n"
    path.write_text(content)
