"""Objects, events and logs of a cluster as files, to analyse a failure afterwards."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError, CommandTimeout

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
_TIMEOUT_S = 10


def dump_cluster(cluster: Cluster, folder: Path) -> None:
    """Creates `folder` and writes the files into it. If objects cannot be read, their file has the reason.

    Unreadable objects raise no error. After the first request that times out, no further request is sent, because the
    next test needs the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(CommandTimeout):
        _dump_objects(Kubectl(cluster.kubeconfig), folder)
    try:
        logs = cluster.logs()
    except ClusterError as error:
        (folder / "cluster.txt").write_text(f"{error}\n")
        return
    for log in logs:
        (folder / "cluster").mkdir(exist_ok=True)
        shutil.copyfile(log, folder / "cluster" / log.name)


def _dump_objects(kubectl: Kubectl, folder: Path) -> None:
    """Writes objects, events and logs of pods. Raises CommandTimeout at the first command that takes too long."""
    for kind in _KINDS:
        _write(folder / f"{kind}.yaml", kubectl, "get", kind, "--all-namespaces", "--output", "yaml")
    _write(folder / "pods.txt", kubectl, "get", "pods", "--all-namespaces", "--output", "wide")
    _write(folder / "events.txt", kubectl, "get", "events", "--all-namespaces", "--sort-by", ".lastTimestamp")
    try:
        pods = kubectl.json("get", "pods", "--all-namespaces", timeout_s=_TIMEOUT_S)["items"]
    except CommandTimeout:
        raise
    except ClusterError:
        pods = []
    for pod in pods:
        _dump_pod(kubectl, pod["metadata"]["namespace"], pod["metadata"]["name"], folder / "pods")


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
        content = kubectl(*arguments, timeout_s=_TIMEOUT_S)
    except CommandTimeout as error:
        path.write_text(f"{error}\n")
        raise
    except ClusterError as error:
        content = f"{error}\n"
    path.write_text(content)
