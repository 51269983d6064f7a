"""Starts a cluster, builds and loads the images and installs the operator, in named stages."""

from __future__ import annotations

from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.install import install_operator
from local_kubernetes.machine.shell import stage


def prepare(cluster: Cluster) -> None:
    """Runs all stages that the end-to-end tests need. A stage whose result exists takes little time."""
    with stage("stage cluster"):
        cluster.up("full")
    with stage("stage images"):
        names = cluster.build_images()
    with stage("stage load"):
        _load(cluster, names)
    with stage("stage install"):
        install_operator(cluster.kubeconfig)


def load_images(cluster: Cluster) -> None:
    """Builds the images and loads them on all nodes."""
    _load(cluster, cluster.build_images())


def _load(cluster: Cluster, names: tuple[str, ...]) -> None:
    for name in names:
        with stage(f"loading {name}"):
            cluster.load_image(name)
