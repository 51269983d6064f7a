"""The shell blocks of docs/quickstart-kubernetes.md work unchanged, one after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from rt_blocks import blocks_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean_default(operator: Kubectl) -> Iterator[None]:
    """Removes the page's objects from the namespace `default` afterwards."""

    def clean() -> None:
        operator("delete", "llm", "--all", "--namespace", "default", timeout_s=180)
        pods = ("pods", "--namespace", "default", "--selector", "rayloom.dev/service")
        operator("wait", "--for=delete", *pods, "--timeout=180s", timeout_s=200)

    clean()
    yield
    clean()


def test_the_page_on_kubernetes_works_as_printed(cluster: Cluster, operator: Kubectl, clean_default: None) -> None:
    page = ROOT / "docs" / "quickstart-kubernetes.md"
    blocks = [block for block in blocks_of(ROOT, page) if block.language == "bash"]
    socket.create_server(("127.0.0.1", 18000)).close()  # the bind fails while another process listens at the port
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    outputs = [_run(block.text, environment) for block in blocks]
    assert "Serving" in outputs[1]
    assert "Paris" in outputs[2]


def _run(text: str, environment: dict[str, str]) -> str:
    command = ["bash", "-euo", "pipefail", "-c", text]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends a port-forward that the block has started
    assert process.returncode == 0, f"{text}\n{output}"
    return output
