"""One node of the local cluster: Linux namespaces with a containerd, a kubelet and a kube-proxy in them.

A node has its own network, mounts and process ids, and a small program is its first process. When this process ends,
the kernel kills all processes of the node and removes its mounts and interfaces. Only its control groups and its folder
are removed by name.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from local_kubernetes.images.graft import graft
from local_kubernetes.images.store import Store
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import NodePlace
from local_kubernetes.machine.processes import Processes, child_of
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, run, wait_until
from local_kubernetes.parts.build import Parts

_CNI_PLUGINS = "/usr/lib/cni"
_CGROUPS = Path("/sys/fs/cgroup")
# Controllers that the kubelet needs for limits of pods.
_CONTROLLERS = ("cpu", "cpuset", "memory", "hugetlb", "pids")
# Mounts the node's own folders over the fixed paths to which containerd and the kubelet write. Then runs $0, the
# program of the node's first process.
_OWN_FOLDERS = """\
set -e
mkdir -p /var/lib/kubelet
for folder in /run /var/log /var/lib/kubelet; do mount -t tmpfs tmpfs $folder; done
exec "$0"
"""


class Node:
    def __init__(self, place: NodePlace, parts: Parts, processes: Processes) -> None:
        self.place = place
        self._parts = parts
        self._processes = processes

    def ensure(self, *, pause_image: str, kubelet_kubeconfig: str, proxy_kubeconfig: str, ca: Path) -> None:
        """Starts those of the node's programs that do not run. The node is Ready a few seconds later."""
        inside = self._ensure_namespaces()
        self._ensure_network(inside)
        self._ensure_cgroup()
        self._ensure_containerd(inside, pause_image)
        self._ensure_kubelet(inside, kubelet_kubeconfig, ca)
        self._ensure_proxy(inside, proxy_kubeconfig)

    def load(self, store: Store, image: str) -> None:
        graft(store, image, self.place.socket)

    def disconnect(self) -> None:
        """Sets the node's network link down and ends its kubelet.

        The node's containers keep running, but are unreachable. `ensure` reconnects the node.
        """
        self.cut_link()
        self._processes.stop(self._name("kubelet"))

    def cut_link(self) -> None:
        run("ip", "link", "set", self.place.link, "down")

    def mend_link(self) -> None:
        place = self.place
        run("ip", "link", "set", place.link, "master", place.cluster.bridge, "up")
        # The kernel has removed the route, because it removes the routes of a device that is down.
        run("ip", "route", "replace", place.pod_cidr, "via", place.ip)

    def _name(self, process: str) -> str:
        return f"{self.place.name}.{process}"

    def _ensure_namespaces(self) -> int:
        """Starts the node's first process if it does not run, and returns its id."""
        new = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
        parent = self._processes.ensure(self._name("init"), *new, "sh", "-c", _OWN_FOLDERS, self._parts.pause)
        wait_until(f"{self.place.name}'s first process", lambda: child_of(parent) is not None, PROGRAM_S)
        first = child_of(parent)
        assert first is not None
        # The shell runs this program only after it has mounted the node's folders.
        wait_until(f"{self.place.name}'s first process", lambda: _program(first) == self._parts.pause, PROGRAM_S)
        return first

    def _ensure_network(self, inside: int) -> None:
        place, cluster = self.place, self.place.cluster
        if not self._is_connected(inside):
            # The link of the node's former network namespace may be left: the kernel removes the link shortly after
            # that namespace.
            with contextlib.suppress(ClusterError):
                run("ip", "link", "delete", place.link)
            run("ip", "link", "add", place.link, "type", "veth", "peer", "name", "eth0", "netns", inside)
            self._run_inside(inside, "ip", "address", "add", f"{place.ip}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._run_inside(inside, "ip", "link", "set", device, "up")
            self._run_inside(inside, "ip", "route", "add", "default", "via", cluster.bridge_ip)
            self._run_inside(inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.mend_link()

    def _is_connected(self, inside: int) -> bool:
        try:
            self._run_inside(inside, "ip", "link", "show", "eth0")
        except ClusterError:
            return False
        return Path(f"/sys/class/net/{self.place.link}").exists()

    def add_route(self, other: NodePlace) -> None:
        """Routes packets for another node's pods over the bridge, without the host's routing."""
        inside = self._ensure_namespaces()
        self._run_inside(inside, "ip", "route", "replace", other.pod_cidr, "via", other.ip)

    def _ensure_cgroup(self) -> None:
        """Creates the control group for all pods of the kubelet, in every hierarchy."""
        for hierarchy in cgroup_hierarchies():
            delegate_controllers(hierarchy)
            group = hierarchy / self.place.cgroup
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                # In version 1 a new cpuset group has no cores and no memory nodes, and no process can enter it.
                if hierarchy.name == "cpuset" and not (group / name).read_text().strip():
                    (group / name).write_text((hierarchy / name).read_text())

    def _ensure_containerd(self, inside: int, pause_image: str) -> None:
        place = self.place
        cni = place.folder / "cni"
        cni.mkdir(parents=True, exist_ok=True)
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            # ptp instead of a bridge, because with ptp every packet is routed. On a bridge, a response between two pods
            # of a node bypasses kube-proxy's rules if the module br_netfilter is not loaded.
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": place.pod_cidr}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                        "dataDir": str(place.folder / "addresses"),
                    },
                }
            ],
        }
        (cni / "10-pods.conflist").write_text(json.dumps(network))
        path = place.folder / "containerd.toml"
        # The configuration sets every path that another containerd of this machine would share. Every pod would fail
        # without restrict_oom_score_adj, because a process without CAP_SYS_RESOURCE may not lower its OOM score.
        config = f"""\
version = 2
root = "{place.folder}/containerd"
state = "{place.folder}/run"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{place.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place.folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{_CNI_PLUGINS}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{place.folder}/runc"
"""
        path.write_text(config)
        self._ensure_inside(inside, "containerd", "containerd", "--config", path, config=config)
        hint = f"its log is {self._log('containerd')}"
        wait_until(f"{place.name}'s containerd", self._containerd_answers, PROGRAM_S, hint)
        self.load(Store.of_buildah(), pause_image)

    def _containerd_answers(self) -> bool:
        try:
            run("ctr", "--address", self.place.socket, "version")
        except ClusterError:
            return False
        return True

    def _ensure_kubelet(self, inside: int, kubeconfig: str, ca: Path) -> None:
        place = self.place
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": place.ip,
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{place.cgroup}",
            "containerRuntimeEndpoint": f"unix://{place.socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(ca)},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [place.cluster.dns_service_ip],
            "clusterDomain": "cluster.local",
            "resolverConfig": "/dev/null",
            "failSwapOn": False,
            "nodeStatusUpdateFrequency": "4s",
            # Image garbage collection is off: the layers are in buildah's storage, so removing images would free no
            # space.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi"},
            "podLogsDir": str(place.folder / "pod-logs"),
            "volumePluginDir": str(place.folder / "volume-plugins"),
        }
        path, config = place.folder / "kubelet.json", json.dumps(settings, indent=1)
        path.write_text(config)
        self._ensure_inside(
            inside,
            "kubelet",
            self._parts.kube,
            "kubelet",
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={place.folder / 'kubelet'}",
            f"--cert-dir={place.folder / 'kubelet-certificates'}",
            f"--hostname-override={place.name}",
            f"--node-ip={place.ip}",
            config=config,
        )

    def _ensure_proxy(self, inside: int, kubeconfig: str) -> None:
        self._ensure_inside(
            inside,
            "kube-proxy",
            self._parts.kube,
            "kube-proxy",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.place.name}",
            f"--cluster-cidr={self.place.cluster.pod_cidr}",
            "--proxy-mode=iptables",
            # 0 leaves these kernel settings unchanged. kube-proxy would change them for the whole machine.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _ensure_inside(self, inside: int, process: str, *command: object, config: str = "") -> None:
        enter = ("nsenter", f"--target={inside}", "--mount", "--net", "--pid", "--")
        self._processes.ensure(self._name(process), *enter, *command, config=config)

    def _run_inside(self, inside: int, *command: object) -> None:
        run("nsenter", f"--target={inside}", "--net", "--", *command)

    def _log(self, process: str) -> Path:
        return self._processes.log(self._name(process))


def is_ready(kubectl: Kubectl, name: str) -> bool:
    try:
        node = kubectl.json("get", "node", name)
    except ClusterError:
        return False
    return any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", []))


def cgroup_hierarchies() -> list[Path]:
    """Folders in which a control group is created: one per controller in version 1, a single folder in version 2.

    Beside the hierarchies of version 1, a hierarchy of version 2 may exist. runc creates groups in that hierarchy, too.
    """
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return sorted(path for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists())


def delegate_controllers(hierarchy: Path) -> None:
    """Enables the kubelet's controllers, as far as the hierarchy has them, for new groups in the hierarchy.

    In version 2 a group has only the controllers that its parent enables. Version 1 needs no change.
    """
    control = hierarchy / "cgroup.subtree_control"
    if not control.exists():
        return
    available = (hierarchy / "cgroup.controllers").read_text().split()
    if wanted := [name for name in _CONTROLLERS if name in available]:
        try:
            control.write_text(" ".join(f"+{name}" for name in wanted))
        except OSError as error:
            names = ", ".join(wanted)
            raise ClusterError(f"{control} refuses {names}, which limits of pods need: {error.strerror}") from error


def _program(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return None
