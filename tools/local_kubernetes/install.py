"""Installs the operator in the cluster from its chart."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from local_kubernetes.images.build import OPERATOR
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import REPOSITORY
from local_kubernetes.machine.shell import PROGRAM_S, run, stage

NAMESPACE = "rayloom-system"
RELEASE = "rayloom-operator"
_CHART = REPOSITORY / "charts" / "rayloom-operator"


def install_operator(kubeconfig: Path, *values: str) -> None:
    """Installs or upgrades the release and waits until it is ready. `values` are `--set` arguments of Helm."""
    kubectl = Kubectl(kubeconfig)
    with stage("operator"):
        # Tests serve models from host folders.
        settings = [word for value in ("allowHostPaths=true", *values) for word in ("--set", value)]
        # With --take-ownership, this release adopts CRDs that were applied by hand or by a release of another name.
        options = ("--namespace", NAMESPACE, "--create-namespace", "--take-ownership", *settings)
        run(helm(), "--kubeconfig", kubeconfig, "upgrade", "--install", RELEASE, _CHART, *options, timeout_s=PROGRAM_S)
        # Pods must be recreated even though the image's name is unchanged: every build here has the same version.
        annotations = {"rayloom.dev/test-image": OPERATOR.inputs("")}
        patch = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
        deployment = ("--namespace", NAMESPACE, "deployment", RELEASE)
        kubectl("patch", *deployment, "--patch", json.dumps(patch))
        kubectl("rollout", "status", f"--timeout={PROGRAM_S:.0f}s", *deployment, timeout_s=PROGRAM_S + 30)


def helm() -> str:
    """The path of Helm: beside this Python's executable, or else on PATH."""
    beside = Path(sys.executable).parent / "helm"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("helm") or "helm"
