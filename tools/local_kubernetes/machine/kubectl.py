"""kubectl for one cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from local_kubernetes.machine.shell import ClusterError, run, start


def ensure_kubectl() -> None:
    """Raises ClusterError when kubectl is not on PATH."""
    if shutil.which("kubectl") is None:
        raise ClusterError("there is no 'kubectl' on PATH; install it: https://kubernetes.io/docs/tasks/tools/")


class Kubectl:
    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    def __call__(self, *arguments: object, stdin: bytes | None = None, timeout_s: float = 60) -> str:
        """Standard output of `kubectl ARGUMENTS`. Raises ClusterError when it fails."""
        return run("kubectl", "--kubeconfig", self._kubeconfig, *arguments, stdin=stdin, timeout_s=timeout_s)

    def json(self, *arguments: object, timeout_s: float = 60) -> Any:
        """Standard output of `kubectl ARGUMENTS --output json`, parsed."""
        return json.loads(self(*arguments, "--output", "json", timeout_s=timeout_s))

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """A running `kubectl ARGUMENTS` with pipes to its stdin and from its stdout. The caller ends it."""
        return start("kubectl", "--kubeconfig", self._kubeconfig, *arguments)

    def apply(self, *objects: object) -> None:
        """Applies manifests, as dictionaries, server-side."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(document).encode())

    def succeeds(self, *arguments: object) -> bool:
        try:
            self(*arguments)
        except ClusterError:
            return False
        return True
