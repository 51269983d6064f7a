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
        """Starts those parts of the cluster that do not run. Returns quickly if all of them run."""

    def down(self) -> None:
        """Removes everything that `up` created, even if only parts of the cluster run."""

    def build_images(self) -> tuple[str, ...]:
        """Builds the images of Rayloom whose sources changed. Returns the names of all images of Rayloom."""

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        """Builds the image `name` from the engine's image, the Dockerfile in `folder` and these build arguments."""

    def load_image(self, name: str) -> None:
        """Makes a built image available on every node, without a registry."""

    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes that run pods."""

    def stop_node(self, name: str) -> None:
        """Makes the node unreachable and ends its kubelet."""

    def start_node(self, name: str) -> None:
        """Restarts a stopped node. Returns when it is Ready."""

    def cut_link(self, name: str) -> None:
        """Cuts the node's network. All processes of the node keep running."""

    def mend_link(self, name: str) -> None:
        """Reverts `cut_link`. Returns at once."""

    def stop_kuberay(self) -> None:
        """Kills KubeRay's operator. If the cluster itself does not restart the operator, `up` does."""

    def logs(self) -> tuple[Path, ...]:
        """Paths of the log files of the cluster's components."""
