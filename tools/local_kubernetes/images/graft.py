"""Gives images of buildah to a node's containerd without copying a layer.

The engine's image has several GB, and every copy of it takes minutes. containerd's overlay snapshots are folders named
`fs`, and buildah's layers are unpacked folders, too. So each snapshot is created as a symlink to a layer's folder. Then
the image is imported from an archive with the real configuration and with placeholders of a few bytes instead of
layers. containerd does not unpack these placeholders, because the snapshots of the layers exist.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from local_kubernetes.images.store import Layer, Store
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, run, wait_until

_SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"


def graft(store: Store, name: str, socket: Path) -> None:
    """Adds the image `name` of buildah's storage to containerd, unless containerd has it.

    The nodes read buildah's layers in place, so layers must stay in the storage while containers use them.
    """
    layers = store.layers(name)
    config = store.config(name)
    index, archive = _archive(name, config, layers)
    if index in _run(socket, "images", "list", f"name=={name}"):
        return
    chain_id = ""
    with_root: list[str] = []
    for layer in layers:
        parent, chain_id = chain_id, _chain_id(chain_id, layer.diff_id)
        if not _has_snapshot(socket, chain_id):
            _link(socket, layer, chain_id, parent)
            with_root.append(chain_id)
    _run(socket, "images", "import", "-", stdin=archive)
    # From here on, the image protects its snapshots. containerd removes the snapshots only when the image has been
    # replaced and is not in use.
    for snapshot in with_root:
        _run(socket, "snapshots", "label", snapshot, "containerd.io/gc.root=")
    # containerd's CRI plugin notices a new image shortly after the import. A pod that starts earlier would not find the
    # image. The plugin ignores names that have the plugin's label, and the import keeps labels. So the plugin would
    # never notice a replaced image. For this reason, this function removes the label and waits until the plugin has an
    # entry of the image.
    _run(socket, "images", "label", name, "io.cri-containerd.image=")
    known = _digest(config)
    wait_until(
        f"containerd to know image {name} as {known}",
        lambda: known in _run(socket, "images", "list", f"name=={known}"),
        PROGRAM_S,
    )
    _forget_replaced(socket)


def grafted_layers(containerd_root: Path) -> frozenset[str]:
    """Ids of the layers that a node reads in place."""
    links = (path for path in containerd_root.glob(f"{_SNAPSHOTS}/*/fs") if path.is_symlink())
    return frozenset(link.readlink().parent.name for link in links)


def _forget_replaced(socket: Path) -> None:
    """Removes the CRI plugin's entries of images without a name. Otherwise the entries would hold their snapshots for
    ever."""
    # NAME TYPE DIGEST ...; the name of such an entry is the digest of the image's configuration.
    rows = [line.split() for line in _run(socket, "images", "list").splitlines()[1:]]
    named = {digest for name, _, digest, *_ in rows if not name.startswith("sha256:")}
    for name, _, digest, *_ in rows:
        if name.startswith("sha256:") and digest not in named:
            # Without --sync containerd delays garbage collection by fifty times its average duration: minutes on a slow
            # disk.
            _run(socket, "images", "remove", "--sync", name)


def _link(socket: Path, layer: Layer, chain_id: str, parent: str) -> None:
    key = f"graft-{chain_id}"
    # The snapshot gets a label. Without it, garbage collection might remove the snapshot before its image is imported.
    _remove_leftover(socket, key)
    _run(socket, "snapshots", "prepare", key, *([parent] if parent else []))
    mounts = _run(socket, "snapshots", "mounts", "/unused", key)
    # The lowest layer is a bind mount of its folder. Every other layer is an overlay with its folder on top.
    found = re.search(r"upperdir=([^, ]+)", mounts) or re.search(r"(/\S+/fs)\b", mounts)
    if found is None:
        raise ClusterError(f"containerd's snapshots are not folders here: {mounts.strip()}")
    folder = Path(found[1])
    folder.rmdir()
    folder.symlink_to(layer.folder)
    _run(socket, "snapshots", "commit", chain_id, key)
    _run(socket, "snapshots", "label", chain_id, "containerd.io/gc.root=graft")


def _remove_leftover(socket: Path, key: str) -> None:
    """Removes the snapshot, if a run that was killed between two calls of containerd has left it."""
    if _has_snapshot(socket, key):
        _run(socket, "snapshots", "remove", key)


def _has_snapshot(socket: Path, key: str) -> bool:
    try:
        _run(socket, "snapshots", "info", key)
    except ClusterError:
        return False
    return True


def _run(socket: Path, *arguments: str, stdin: bytes | None = None) -> str:
    return run("ctr", "--address", socket, "--namespace", "k8s.io", *arguments, stdin=stdin)


def _chain_id(parent: str, diff_id: str) -> str:
    """The ChainID of a stack of layers:
    https://github.com/opencontainers/image-spec/blob/main/config.md#layer-chainid
    """
    return _digest(f"{parent} {diff_id}".encode()) if parent else diff_id


def _archive(name: str, config: bytes, layers: Sequence[Layer]) -> tuple[str, bytes]:
    """The manifest's digest, and an OCI archive of the image with placeholders for its layers."""
    placeholders = [layer.diff_id.encode() for layer in layers]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", blob) for blob in placeholders],
        }
    ).encode()
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    settings = json.loads(config)
    entry["platform"] = {"architecture": settings["architecture"], "os": settings["os"]}
    entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
    } | {f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob for blob in (config, manifest, *placeholders)}
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return _digest(manifest), output.getvalue()


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
