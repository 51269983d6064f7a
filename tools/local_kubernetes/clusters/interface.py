"""The interface of every kind of cluster to the end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Mode = Literal["api", "full"]
"""api: the API server, controllers and KubeRay, without nodes. full: everything."""


@runtime_checkable
class Cluster(Protocol):
    @property
    def kubeconfig(self) -> Path:
        """The path of an administrator's kubeconfig."""

    def up(self, mode: Mode) -> None:
        """Starts the cluster, or repairs one that runs partly. Returns quickly if the cluster already works."""

    def down(self) -> None:
        """Removes everything that `up` created, even from a cluster that runs partly."""

    def build_images(self) -> tuple[str, ...]:
        """Names of Rayloom's images. Builds an image whose sources changed."""

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        """Builds an image of this name FROM the engine's image, by `folder`'s Dockerfile with these build arguments."""

    def load_image(self, name: str) -> None:
        """Lets every node start containers of a built image without a registry."""

    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes that run pods."""

    def stop_node(self, name: str) -> None:
        """Makes the node unreachable and ends its kubelet."""

    def start_node(self, name: str) -> None:
        """Restarts a stopped node. Returns when it is Ready."""

    def cut_link(self, name: str) -> None:
        """Cuts the node's network. All its processes keep running."""

    def mend_link(self, name: str) -> None:
        """Reverts `cut_link`. Returns at once."""

    def stop_kuberay(self) -> None:
        """Kills KubeRay's operator. `up` restarts the operator unless the cluster itself does."""

    def logs(self) -> tuple[Path, ...]:
        """Paths of the log files of the cluster's components."""
