"""The shell blocks of docs/kubernetes.md, in order, as they are printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from rt_blocks import blocks_of

ROOT = Path(__file__).parent.parent


def test_the_page_on_kubernetes_works_as_printed(cluster: Cluster, operator: Kubectl) -> None:
    blocks = [block for block in blocks_of(ROOT, ROOT / "docs" / "kubernetes.md") if block.language == "bash"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    try:
        outputs = [_run(block.text, environment) for block in blocks]
    finally:
        operator("delete", "llm", "--all", "--namespace", "default", "--wait=false")
    assert "Serving" in outputs[1]
    assert "Paris" in outputs[2]


def _run(text: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout
