"""A cluster of processes on this machine: real Kubernetes and real containers, without Docker or a registry."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from local_kubernetes.clusters.interface import Mode
from local_kubernetes.components.control_plane import ControlPlane
from local_kubernetes.components.node import Node, cgroup_hierarchies, is_ready
from local_kubernetes.images import build as images
from local_kubernetes.images.base import base_image, pause_image
from local_kubernetes.images.graft import grafted_layers
from local_kubernetes.images.store import Store, storage_lock
from local_kubernetes.machine.debian import ensure_packages, ensure_root
from local_kubernetes.machine.files import locked, remove_folder, write_whole
from local_kubernetes.machine.kubectl import Kubectl, ensure_kubectl
from local_kubernetes.machine.place import NODE_NAMES, Place
from local_kubernetes.machine.processes import Processes, living_clusters
from local_kubernetes.machine.runs import refuse_beside_another, refuse_beside_twin
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, run, stage, wait_until
from local_kubernetes.parts.build import build_parts, remove_partials


class LocalCluster:
    """A local cluster. All its state is in a folder, so that later commands can continue with the same cluster."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._processes = Processes(place.state)

    @property
    def kubeconfig(self) -> Path:
        return self._place.kubeconfig

    def up(self, mode: Mode) -> None:
        refuse_beside_another()
        refuse_beside_twin(self._place.state)
        ensure_kubectl()
        if mode == "full":
            ensure_root("MODE=full, a cluster with nodes,")
        ensure_packages(nodes=mode == "full", images=mode == "full")
        parts = build_parts()
        with self._lock():
            had = self._finished_mode()
            if had is None or (had, mode) == ("api", "full"):
                # If `had` is None, an `up` that did not finish, or an `up` before the last reboot, has left remains. If
                # `had` is `api`, the cluster had no nodes, and nodes could not reach the address of its API server.
                self._remove()
            wanted: Mode = "full" if had == "full" else mode
            self._place.state.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._marker.unlink(missing_ok=True)
            if wanted == "full":
                self._ensure_bridge()
            control = ControlPlane(
                self._place,
                parts,
                self._processes,
                address=self._place.bridge_ip if wanted == "full" else "127.0.0.1",
            )
            with stage("control plane"):
                control.ensure_api()
                control.ensure_scheduler()
                control.ensure_kuberay()
            if wanted == "full":
                with stage("nodes"):
                    control.ensure_dns()
                    self._ensure_nodes(control)
            self._processes.expect_all_alive()
            write_whole(self._marker, json.dumps({"mode": wanted, "boot": _boot_id()}))

    def down(self) -> None:
        refuse_beside_another()
        with self._lock():
            self._remove()

    def build_images(self) -> tuple[str, ...]:
        ensure_root("building images without Docker")
        ensure_packages(nodes=False, images=True)
        base = base_image()
        with storage_lock():
            for image in images.IMAGES:
                images.build_with_buildah(image, base)
            # All clusters of this machine share buildah's storage, so a layer must stay while any of the clusters uses
            # it.
            nodes = [root for state in living_clusters() for root in state.glob("nodes/*/containerd")]
            images.remove_unused(base, frozenset().union(*(grafted_layers(root) for root in nodes)))
        return tuple(image.name for image in images.IMAGES)

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        with storage_lock():
            images.derive_with_buildah(name, folder, arguments)

    def load_image(self, name: str) -> None:
        with storage_lock():
            store = Store.of_buildah()
            for node in self._nodes():
                node.load(store, name)

    def node_names(self) -> tuple[str, ...]:
        return NODE_NAMES

    def stop_node(self, name: str) -> None:
        self._node(name).disconnect()

    def start_node(self, name: str) -> None:
        self._node(name)  # raises ValueError for an unknown name
        self.up("full")

    def cut_link(self, name: str) -> None:
        self._node(name).cut_link()

    def mend_link(self, name: str) -> None:
        self._node(name).mend_link()

    def stop_kuberay(self) -> None:
        self._processes.stop("kuberay")

    def logs(self) -> tuple[Path, ...]:
        return tuple(sorted(self._place.logs.glob("*.log")))

    @property
    def _marker(self) -> Path:
        """A file that exists after a complete `up`."""
        return self._place.state / "up.json"

    def _finished_mode(self) -> Mode | None:
        """The mode of the last `up`; None if that `up` was not complete or came before the last boot of the machine."""
        try:
            written = json.loads(self._marker.read_text())
        except FileNotFoundError:
            return None
        mode: Mode | None = written["mode"] if written["boot"] == _boot_id() else None
        return mode

    def _ensure_bridge(self) -> None:
        bridge = self._place.bridge
        if not Path(f"/sys/class/net/{bridge}").exists():
            run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "replace", f"{self._place.bridge_ip}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")

    def _ensure_nodes(self, control: ControlPlane) -> None:
        nodes = [self._node(name) for name in NODE_NAMES]
        pause = pause_image(build_parts().pause)
        for node in nodes:
            subject = f"/O=system:nodes/CN=system:node:{node.place.name}"
            node.ensure(
                pause_image=pause,
                kubelet_kubeconfig=control.kubeconfig(f"kubelet-{node.place.name}", subject),
                proxy_kubeconfig=control.kubeconfig("kube-proxy", "/CN=system:kube-proxy"),
                ca=control.authority.ca.certificate,
            )
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.add_route(other.place)
        kubectl = Kubectl(self.kubeconfig)
        for node in nodes:
            name = node.place.name
            log = self._processes.log(f"{name}.kubelet")
            wait_until(f"{name} to be Ready", lambda name=name: is_ready(kubectl, name), PROGRAM_S, f"its log is {log}")  # type: ignore[misc]

    def _nodes(self) -> list[Node]:
        """The nodes of this cluster that were started, whether they still run or not."""
        return [self._node(name) for name in NODE_NAMES if self._place.node(name).socket.exists()]

    def _node(self, name: str) -> Node:
        if name not in NODE_NAMES:
            raise ClusterError(f"there is no node {name!r}; there are: {', '.join(NODE_NAMES)}")
        return Node(self._place.node(name), build_parts(), self._processes)

    def _remove(self) -> None:
        """Ends all processes and removes all files of the cluster, whether it is complete or left by a killed run."""
        # The marker is removed first, so that a partly removed cluster does not count as a complete cluster.
        self._marker.unlink(missing_ok=True)
        self._processes.stop_all()
        self._remove_cgroups()
        if Path(f"/sys/class/net/{self._place.bridge}").exists():
            for name in NODE_NAMES:
                # The link may be gone: the kernel removes it shortly after the node's network namespace.
                with contextlib.suppress(ClusterError):
                    run("ip", "link", "delete", self._place.node(name).link)
            run("ip", "link", "delete", self._place.bridge)
        remove_folder(self._place.state)

    def _remove_cgroups(self) -> None:
        names = [self._place.node(name).cgroup for name in NODE_NAMES]
        groups = [hierarchy / name for hierarchy in cgroup_hierarchies() for name in names]

        def all_gone() -> bool:
            for group in groups:
                for folder in sorted(group.rglob("*/"), reverse=True):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                with contextlib.suppress(OSError):
                    group.rmdir()
            return not any(group.exists() for group in groups)

        wait_until("the end of the nodes' containers", all_gone, PROGRAM_S)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Allows only one command at a time to change the cluster."""
        with locked(self._place.lock, f"cluster {self._place.index}", 2 * PROGRAM_S):
            yield


def remove_left_builds() -> None:
    """Removes the remains of killed builds of parts and images."""
    remove_partials()
    if os.geteuid() == 0 and shutil.which("buildah") is not None:
        with storage_lock():
            images.remove_working_containers()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
