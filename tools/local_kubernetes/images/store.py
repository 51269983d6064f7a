"""A read-only view of buildah's storage: images, their layers, and the folder of each unpacked layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_kubernetes.machine.files import locked
from local_kubernetes.machine.shell import ClusterError, run

# Marks of our content in the storage: the label of every image, and the name prefix of working containers.
LABEL = "dev.rayloom.image"
CONTAINER = "rayloom-e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    id: str
    diff_id: str  # sha256:... of the layer's tar archive
    folder: Path  # the layer's unpacked files
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    id: str
    names: tuple[str, ...]
    top_layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingContainer:
    """A container in which buildah runs a build step."""

    id: str
    names: tuple[str, ...]
    top_layer: str | None  # top layer of the container's image; None for scratch, or when the image was removed


class Store:
    """A snapshot of the storage's records at the time of construction."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._layers = {layer["id"]: layer for layer in _records(root / "overlay-layers" / "layers.json")}
        self._images = [
            StoredImage(id=image["id"], names=tuple(image.get("names") or ()), top_layer=image.get("layer", ""))
            for image in _records(root / "overlay-images" / "images.json")
        ]

    @classmethod
    def of_buildah(cls) -> Store:
        """Reads the storage. Raises ClusterError unless buildah keeps layers as plain folders."""
        return cls(_root())

    def images(self) -> tuple[StoredImage, ...]:
        return tuple(self._images)

    def containers(self) -> tuple[WorkingContainer, ...]:
        image_to_layer = {image.id: image.top_layer for image in self._images}
        return tuple(
            WorkingContainer(
                id=container["id"],
                names=tuple(container.get("names") or ()),
                top_layer=image_to_layer.get(container.get("image", "")),
            )
            for container in _records(self._root / "overlay-containers" / "containers.json")
        )

    def layers(self, name: str) -> tuple[Layer, ...]:
        """The image's layers from the lowest to the highest. Raises ClusterError when the image does not exist."""
        return self.chain(self._image(name))

    def chain(self, image: StoredImage) -> tuple[Layer, ...]:
        chain: list[Layer] = []
        key = image.top_layer
        while key:
            record = self._layers[key]
            chain.insert(
                0,
                Layer(
                    id=key,
                    diff_id=record["diff-digest"],
                    folder=self._root / "overlay" / key / "diff",
                    num_bytes=record["diff-size"],
                ),
            )
            key = record.get("parent", "")
        return tuple(chain)

    def config(self, name: str) -> bytes:
        """The image's configuration, byte for byte, because its digest is part of the image."""
        return self._config(self._image(name))

    def _config(self, image: StoredImage) -> bytes:
        folder = self._root / "overlay-images" / image.id
        wanted = json.loads((folder / "manifest").read_bytes())["config"]["digest"]
        for path in folder.iterdir():
            content = path.read_bytes()
            if f"sha256:{hashlib.sha256(content).hexdigest()}" == wanted:
                return content
        raise ClusterError(f"buildah's record of image {image.id} is incomplete; remove it: buildah rmi {image.id}")

    def label(self, name: str, key: str) -> str | None:
        """The label's value; None when the image or the label does not exist."""
        found = [image for image in self._images if name in image.names]
        return self.labels(found[0]).get(key) if found else None

    def labels(self, image: StoredImage) -> dict[str, str]:
        labels: dict[str, str] = json.loads(self._config(image)).get("config", {}).get("Labels") or {}
        return labels

    def _image(self, name: str) -> StoredImage:
        found = [image for image in self._images if name in image.names]
        if not found:
            raise ClusterError(f"there is no image {name}; build it first: make images")
        return found[0]


@contextmanager
def storage_lock() -> Iterator[None]:
    """Allows only one process at a time, of any checkout, to change the storage or to give its layers to nodes."""
    with locked(_root() / "rayloom.lock", "buildah's storage", 3600):
        yield


def _root() -> Path:
    """The folder of buildah's storage. Raises ClusterError unless buildah keeps layers as plain folders."""
    found = json.loads(run("buildah", "info"))["store"]
    if found["GraphDriverName"] != "overlay":
        driver = found["GraphDriverName"]
        raise ClusterError(f"buildah stores layers with {driver!r}; only overlay's can be shared with nodes")
    return Path(found["GraphRoot"])


def _records(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
    return records
