"""Installs the chart on an API server without nodes. Its objects are real; its Deployment has no replicas."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

from local_kubernetes.install import NAMESPACE, RELEASE, helm
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import REPOSITORY
from local_kubernetes.machine.shell import run
from operator_processes.process import Credentials
from simulated_nodes.api_client import Document

CHART = REPOSITORY / "charts" / "rayloom-operator"
_TOKEN_S = 36_000


def install_chart(kubeconfig: Path, *values: str, namespace: str = NAMESPACE) -> None:
    """Installs or upgrades the release. `values`: `--set` arguments. Operators run outside of the cluster."""
    kubectl = Kubectl(kubeconfig)
    if (CHART / "crds").is_dir():
        # Helm installs a chart's CRDs once and never updates them.
        kubectl("apply", "--server-side", "--force-conflicts", "--filename", CHART / "crds")
    settings = [word for value in values for word in ("--set", value)]
    options = ("--namespace", namespace, "--create-namespace", *settings)
    run(helm(), "--kubeconfig", kubeconfig, "upgrade", "--install", RELEASE, CHART, *options)
    kubectl("scale", "--namespace", namespace, f"deployment/{RELEASE}", "--replicas=0")


def uninstall_chart(kubeconfig: Path, namespace: str = NAMESPACE) -> None:
    run(helm(), "--kubeconfig", kubeconfig, "uninstall", RELEASE, "--namespace", namespace, "--ignore-not-found")


def credentials(request: Callable[..., Document], namespace: str = NAMESPACE) -> Credentials:
    """The credentials of the chart's pods: its ServiceAccount's token and the key from its Secret.

    `request(method, path, body)` returns the API server's answer. kubectl would need 0.2 s of CPU time.
    """
    base = f"/api/v1/namespaces/{namespace}"
    secret = request("GET", f"{base}/secrets/{RELEASE}-key")
    asked = {"spec": {"expirationSeconds": _TOKEN_S}}
    token = request("POST", f"{base}/serviceaccounts/{RELEASE}/token", asked)["status"]["token"]
    return Credentials(token=token, key=base64.b64decode(secret["data"]["key"]).decode())
