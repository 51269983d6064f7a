"""A cluster in Docker containers, by `kind`, with KubeRay from its Helm chart.

The chart's repository must be registered in Helm as `kuberay`, as in KubeRay's installation instructions.

This kind of cluster needs Docker. This project's checks and figures come from the local cluster. There are no
measurements with kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from local_kubernetes.clusters.interface import Mode
from local_kubernetes.components.node import is_ready
from local_kubernetes.images import build as images
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import Place
from local_kubernetes.machine.shell import run, run_shown, stage, wait_until

_CONFIG = Path(__file__).with_name("kind.yaml")
_KUBERAY_CHART = ("kuberay/kuberay-operator", "--version", "1.6.0")


class KindCluster:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._name = f"rayloom-e2e-{place.index}"

    @property
    def kubeconfig(self) -> Path:
        return self._place.kubeconfig.with_name("kind-kubeconfig")

    def up(self, mode: Mode) -> None:
        """Creates the cluster if it does not exist. `mode` has no effect, because kind has no cluster without nodes."""
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        if self._name not in run("kind", "get", "clusters").split():
            with stage("kind"):
                run_shown("kind", "create", "cluster", "--name", self._name, "--config", _CONFIG, "--wait", "3m")
        self.kubeconfig.write_text(run("kind", "get", "kubeconfig", "--name", self._name))
        with stage("KubeRay"):
            release = ("kuberay", *_KUBERAY_CHART, "--namespace", "kuberay-system", "--create-namespace", "--wait")
            run_shown("helm", "--kubeconfig", self.kubeconfig, "upgrade", "--install", *release)

    def down(self) -> None:
        # `kind delete` also succeeds if the cluster does not exist.
        run_shown("kind", "delete", "cluster", "--name", self._name)
        self.kubeconfig.unlink(missing_ok=True)

    def build_images(self) -> tuple[str, ...]:
        for image in images.IMAGES:
            images.build_with_docker(image)
        return tuple(image.name for image in images.IMAGES)

    def derive_image(self, name: str, folder: Path, arguments: Mapping[str, str]) -> None:
        images.derive_with_docker(name, folder, arguments)

    def load_image(self, name: str) -> None:
        run_shown("kind", "load", "docker-image", "--name", self._name, name)

    def node_names(self) -> tuple[str, ...]:
        nodes = run("kind", "get", "nodes", "--name", self._name).split()
        return tuple(sorted(node for node in nodes if not node.endswith("control-plane")))

    def stop_node(self, name: str) -> None:
        run(images.docker(), "pause", name)

    def start_node(self, name: str) -> None:
        run(images.docker(), "unpause", name)
        wait_until(f"{name} to be Ready", lambda: is_ready(Kubectl(self.kubeconfig), name), 120)

    def cut_link(self, name: str) -> None:
        run(images.docker(), "network", "disconnect", "kind", name)

    def mend_link(self, name: str) -> None:
        run(images.docker(), "network", "connect", "kind", name)

    def stop_kuberay(self) -> None:
        pods = ("pods", "--namespace", "kuberay-system", "--all")
        Kubectl(self.kubeconfig)("delete", *pods, "--grace-period=0", "--force")

    def logs(self) -> tuple[Path, ...]:
        folder = self.kubeconfig.with_name("kind-logs")
        run("kind", "export", "logs", folder, "--name", self._name)
        return tuple(path for path in sorted(folder.rglob("*.log")) if path.is_file())
