"""What the end-to-end tests need of a cluster, wherever it runs."""

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
        """For an administrator."""

    def up(self, mode: Mode) -> None:
        """The cluster works afterwards. Quick when it did already; mended when it only did partly."""

    def down(self) -> None:
        """Nothing of a cluster that `up` made is left afterwards, whatever state it was in."""

    def build_images(self) -> tuple[str, ...]:
        """The names of Rayloom's images, built from the repository where it changed."""

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        """An image of this name FROM the engine's, by the folder's Dockerfile with these build arguments."""

    def load_image(self, name: str) -> None:
        """Every node can start containers of a built image without a registry."""

    def node_names(self) -> tuple[str, ...]:
        """Nodes that pods can run on."""

    def stop_node(self, name: str) -> None:
        """The node is lost: unreachable, its kubelet gone."""

    def start_node(self, name: str) -> None:
        """Brings a stopped node back. Returns when it is Ready."""

    def cut_link(self, name: str) -> None:
        """The node's network is gone; everything in it goes on."""

    def mend_link(self, name: str) -> None:
        """Takes `cut_link` back. Returns at once."""

    def stop_kuberay(self) -> None:
        """KubeRay's operator ends at once; `up` brings it back where it does not come back by itself."""

    def logs(self) -> tuple[Path, ...]:
        """Files to look into when something failed."""
