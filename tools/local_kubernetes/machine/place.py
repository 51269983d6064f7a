"""Folders, names and addresses of one local cluster on this machine.

Several clusters may run side by side: the index is part of every name, port and address. The default index is 0.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
NODE_NAMES = ("node-a", "node-b")
INDICES = range(10)
# Usual ports of the components that listen on this machine: DNS, etcd (two), API server, KubeRay (two).
HOST_PORTS = (53, 2379, 2380, 6443, 8080, 8082)


def cache_folder() -> Path:
    """The folder of compiled programs, which all clusters share; in $RAYLOOM_CACHE, if that is set."""
    given = os.environ.get("RAYLOOM_CACHE")
    return (Path(given).resolve() if given else _base("XDG_CACHE_HOME", ".cache") / "rayloom") / "e2e"


def known_indices() -> tuple[int, ...]:
    """Indices of local clusters that may have left files or processes here: 0, and all indices with a folder."""
    folders = Place.of(0).state.parent.glob("[0-9]")
    return tuple(sorted({0} | {int(folder.name) for folder in folders}))


def _base(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    index: int
    state: Path
    """The folder of all files that the cluster writes. Removing the cluster removes this folder."""

    @classmethod
    def of(cls, index: int = 0) -> Place:
        """Returns the place of the cluster with this index. Raises ValueError for an index outside of 0 to 9."""
        if index not in INDICES:
            raise ValueError(f"cluster index {index}: 0 to 9 is possible")
        # The path is short because sockets are below it, and Linux limits paths of sockets to 107 characters.
        return cls(index=index, state=_base("XDG_STATE_HOME", ".local/state") / "rayloom" / "e2e" / str(index))

    @property
    def lock(self) -> Path:
        return self.state.with_suffix(".lock")

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def bridge(self) -> str:
        """The host's network device to which the nodes are connected."""
        return f"rayloom{self.index}"

    @property
    def bridge_ip(self) -> str:
        return f"10.{200 + self.index}.0.1"

    @property
    def service_cidr(self) -> str:
        return f"10.{96 + self.index}.0.0/16"

    @property
    def api_service_ip(self) -> str:
        return f"10.{96 + self.index}.0.1"

    @property
    def dns_service_ip(self) -> str:
        return f"10.{96 + self.index}.0.10"

    @property
    def pod_cidr(self) -> str:
        return f"10.{220 + self.index}.0.0/16"

    def port(self, usual: int) -> int:
        """The host port by which this cluster replaces a component's usual port. `usual`: one of HOST_PORTS."""
        assert usual in HOST_PORTS, f"{usual} is not in HOST_PORTS"
        return usual + 20000 + 10 * self.index

    def node(self, name: str) -> NodePlace:
        return NodePlace(cluster=self, name=name, number=NODE_NAMES.index(name) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    cluster: Place
    name: str
    number: int  # the number of the node, counted from 1

    @property
    def folder(self) -> Path:
        return self.cluster.state / "nodes" / self.name

    @property
    def socket(self) -> Path:
        """The socket of containerd."""
        return self.folder / "run" / "containerd.sock"

    @property
    def ip(self) -> str:
        return f"10.{200 + self.cluster.index}.0.{10 + self.number}"

    @property
    def pod_cidr(self) -> str:
        return f"10.{220 + self.cluster.index}.{self.number}.0/24"

    @property
    def link(self) -> str:
        """The host's end of the node's veth pair."""
        return f"{self.cluster.bridge}-{self.number}"

    @property
    def cgroup(self) -> str:
        return f"{self.cluster.bridge}-{self.name}"


def digest(*parts: bytes) -> str:
    """The first twelve hexadecimal digits of a SHA-256 over the parts and their lengths."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:12]
