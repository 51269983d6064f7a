"""Chooses the cluster of a command from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from local_kubernetes.clusters.existing import ExistingCluster
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.clusters.kind import KindCluster
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.place import Place


def chosen_cluster(environ: Mapping[str, str], index: int = 0) -> Cluster:
    """The existing cluster of the kubeconfig $E2E_KUBECONFIG, if it is set. Otherwise a cluster of the kind
    $E2E_CLUSTER.

    $E2E_CLUSTER is `local` (the default) or `kind`. Raises ValueError for any other value.
    """
    if given := environ.get("E2E_KUBECONFIG"):
        return ExistingCluster(Path(given))
    kind = environ.get("E2E_CLUSTER") or "local"
    if kind == "local":
        return LocalCluster(Place.of(index))
    if kind == "kind":
        return KindCluster(Place.of(index))
    raise ValueError(f"E2E_CLUSTER={kind}: local and kind are possible")
