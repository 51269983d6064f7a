"""Where one local cluster lives on this machine: its folder, its names and its addresses.

Several may run side by side: everything that they would share carries the index, and index 0 is the usual one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
NODE_NAMES = ("node-a", "node-b")
INDICES = range(10)


def cache_folder() -> Path:
    """What is expensive to make and independent of any cluster."""
    return _base("XDG_CACHE_HOME", ".cache") / "rayloom" / "e2e"


def known_indices() -> tuple[int, ...]:
    """The local clusters that may have left something here: the usual one, and others that have a folder."""
    folders = Place.of(0).state.parent.glob("[0-9]")
    return tuple(sorted({0} | {int(folder.name) for folder in folders}))


def _base(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    index: int
    state: Path
    """Everything that the cluster writes. Removing the cluster removes it."""

    @classmethod
    def of(cls, index: int = 0) -> Place:
        """Raises ValueError for an index whose addresses would not be valid."""
        if index not in INDICES:
            raise ValueError(f"cluster index {index}: 0 to 9 is possible")
        # Short, because sockets lie below it and their paths may have no more than 107 characters.
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
        """The host's network device that the nodes hang on."""
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
        """This cluster's number for a port that every cluster needs one of on the host."""
        return usual + 20000 + 10 * self.index

    def node(self, name: str) -> NodePlace:
        return NodePlace(cluster=self, name=name, number=NODE_NAMES.index(name) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    cluster: Place
    name: str
    number: int  # from 1

    @property
    def folder(self) -> Path:
        return self.cluster.state / "nodes" / self.name

    @property
    def socket(self) -> Path:
        """containerd's."""
        return self.folder / "run" / "containerd.sock"

    @property
    def ip(self) -> str:
        return f"10.{200 + self.cluster.index}.0.{10 + self.number}"

    @property
    def pod_cidr(self) -> str:
        return f"10.{220 + self.cluster.index}.{self.number}.0/24"

    @property
    def link(self) -> str:
        """The host's end of the cable to the node."""
        return f"{self.cluster.bridge}-{self.number}"

    @property
    def cgroup(self) -> str:
        return f"{self.cluster.bridge}-{self.name}"


def digest(*parts: bytes) -> str:
    """Twelve characters that differ when a part differs."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:12]
