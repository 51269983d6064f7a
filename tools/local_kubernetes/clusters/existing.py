"""An existing cluster with KubeRay, whose nodes have the images or can pull them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_kubernetes.clusters.interface import Mode
from local_kubernetes.images import build as images
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError


@dataclass(frozen=True, slots=True)
class ExistingCluster:
    kubeconfig: Path

    def up(self, mode: Mode) -> None:
        """Only checks the cluster: raises ClusterError when it does not answer."""
        Kubectl(self.kubeconfig)("get", "--raw", "/readyz")

    def down(self) -> None:
        """Does nothing, because this program has not created the cluster."""

    def build_images(self) -> tuple[str, ...]:
        return tuple(image.name for image in images.IMAGES)

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        raise ClusterError(
            "what E2E_KUBECONFIG has takes images from a registry; run these tests on a cluster of our own"
        )

    def load_image(self, name: str) -> None:
        """Does nothing, because the nodes have the image or can pull it."""

    def node_names(self) -> tuple[str, ...]:
        nodes = Kubectl(self.kubeconfig).json("get", "nodes")["items"]
        return tuple(sorted(node["metadata"]["name"] for node in nodes if not node["spec"].get("taints")))

    def stop_node(self, name: str) -> None:
        raise ClusterError("these tests cannot stop the cluster of E2E_KUBECONFIG; run them on a local one")

    def start_node(self, name: str) -> None:
        self.stop_node(name)

    def cut_link(self, name: str) -> None:
        self.stop_node(name)

    def mend_link(self, name: str) -> None:
        self.stop_node(name)

    def stop_kuberay(self) -> None:
        self.stop_node("")

    def logs(self) -> tuple[Path, ...]:
        return ()
