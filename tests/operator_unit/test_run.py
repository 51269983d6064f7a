"""The operator's process against an API server that is a dictionary: start, work, being asked to stop, being deposed.

Left out: two processes, which are tested on a real API server.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from rt_api_server import serving
from rt_world import service

LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/rayloom-operator"


class Operator:
    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        (folder / "key").write_text("0123456789abcdef")
        flags = ["--engine-image=e", f"--key-file={folder / 'key'}", f"--health-port={port}", "--log-format=json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rayloom_operator", "run", *flags, "--lease-namespace=system", "--lease-seconds=2"],
            env=os.environ | {"KUBECONFIG": str(folder / "kubeconfig")},
            stderr=(folder / "log").open("w"),
        )

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
            return response.read().decode()

    def until(self, condition):
        """Returns once that is so; a condition that the operator does not answer yet is not."""
        end = time.monotonic() + 30
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError(self.log())

    def log(self):
        return (self.folder / "log").read_text()

    def end(self):
        self.process.wait(15)
        return self.process.returncode


@pytest.fixture
def world(tmp_path):
    with serving(tmp_path) as server:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        operator = Operator(tmp_path, port)
        try:
            yield server, operator
        finally:
            operator.process.kill()
            operator.process.wait()


def test_it_leads_works_and_gives_the_lease_back_when_it_is_asked_to_stop(world):
    server, operator = world
    kube = server.kube
    operator.until(lambda: "rayloom_operator_leader 1.0" in operator.get("/metrics"))
    assert (operator.get("/healthz"), operator.get("/readyz")) == ("ok", "ok")
    server.put(service())
    operator.until(lambda: kube.statuses)
    operator.until(lambda: len(kube.named("RayCluster")) == 1)
    operator.process.send_signal(signal.SIGTERM)
    assert (operator.end(), kube.objects[LEASE]["spec"]["holderIdentity"]) == (0, "")
    assert all(json.loads(line)["time"] for line in operator.log().splitlines())


def test_it_ends_when_another_one_leads(world):
    server, operator = world
    kube = server.kube
    operator.until(lambda: LEASE in kube.objects)
    found = kube.objects[LEASE]
    server.put(found | {"spec": found["spec"] | {"holderIdentity": "other"}})
    assert operator.end() == 1
    assert "the lease went to other, so this process ends and changes nothing any more" in operator.log()
    assert kube.objects[LEASE]["spec"]["holderIdentity"] == "other"
