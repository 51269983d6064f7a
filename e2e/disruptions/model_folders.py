"""The embedded model in a folder that has the same path on every node."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from local_kubernetes.machine.kubectl import Kubectl


def model_on_the_nodes() -> Path:
    """A folder that every user can read. Skips the test if the nodes do not see this machine's folders."""
    from rayloom_engine.models.checkpoint.source import resolve

    converted = resolve("builtin://smollm2-135m").path
    if os.environ.get("E2E_CLUSTER") == "kind" or os.environ.get("E2E_KUBECONFIG"):
        pytest.skip("the nodes do not see this machine's folders")
    # The folder is outside of HOME, which other users cannot enter. Its name contains the name of the converted
    # model's folder, so its files are never out of date.
    folder = Path("/var/tmp") / f"rayloom-e2e-{converted.name}"
    if not folder.exists():
        _copy(converted, folder, shutil.copyfile)
    return folder


@contextmanager
def claim_on_the_nodes(kubectl: Kubectl, namespace: str, claim: str, path: str) -> Iterator[None]:
    """A PersistentVolumeClaim for a host folder, which has the model at `path`."""
    root = Path(tempfile.mkdtemp(prefix="rayloom-e2e-claim-", dir="/var/tmp"))
    root.chmod(0o755)
    volume = {"kind": "PersistentVolume", "metadata": {"name": f"{namespace}-{claim}"}}
    amount = {"storage": "1Gi"}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    try:
        link_model(root / path)
        kubectl.apply(
            {"apiVersion": "v1", **volume, "spec": common | {"capacity": amount, "hostPath": {"path": str(root)}}},
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": claim, "namespace": namespace},
                "spec": common | {"volumeName": f"{namespace}-{claim}", "resources": {"requests": amount}},
            },
        )
        yield
    finally:
        kubectl("delete", "pv", f"{namespace}-{claim}", "--ignore-not-found", "--wait=false")
        shutil.rmtree(root)


def link_model(folder: Path) -> None:
    """Creates `folder` atomically, with links to the files of `model_on_the_nodes()`."""
    _copy(model_on_the_nodes(), folder, os.link)


def _copy(source: Path, folder: Path, copy: Callable[..., object]) -> None:
    draft = Path(tempfile.mkdtemp(prefix="rayloom-e2e-draft-", dir=folder.parent))
    shutil.copytree(source, draft, dirs_exist_ok=True, copy_function=copy)
    draft.chmod(0o755)
    for path in draft.iterdir():
        path.chmod(0o644)
    draft.rename(folder)
