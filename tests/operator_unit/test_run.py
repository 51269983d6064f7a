"""The operator's process with an API server that is a dictionary: start, work, standby, stop, and a lost Lease.

Not covered: two processes that are under load or cut off from the API server. Tests with a real API server cover them.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rt_api_server import serving
from rt_ports import free_port
from rt_warm_python import warm_python
from rt_world import service

SERVICES = "/apis/rayloom.dev/v1alpha1/llmservices"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/rayloom-operator"


class Operator:
    def __init__(self, folder, port, *more, is_fork):
        self.folder = folder
        self.port = port
        (folder / "key").write_text("0123456789abcdef")
        flags = [
            "--engine-image=e",
            f"--key-file={folder / 'key'}",
            f"--health-port={port}",
            "--log-format=json",
            *more,
        ]
        arguments = ["run", *flags, "--lease-namespace=system", "--lease-seconds=8"]
        environment = os.environ | {"KUBECONFIG": str(folder / "kubeconfig")}
        with (folder / "log").open("w") as log:
            if is_fork:
                self.process = warm_python("rayloom_operator.__main__", "rayloom_operator.cli.run").start(
                    "rayloom_operator.__main__:main",
                    arguments,
                    environment=environment,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                )
            else:
                command = [sys.executable, "-m", "rayloom_operator", *arguments]
                self.process = subprocess.Popen(command, env=environment, stderr=log)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as response:
            return response.read().decode()

    def until(self, condition):
        """Returns once the condition is true. A condition counts as false while the operator refuses connections."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError(self.log())

    def log(self):
        return (self.folder / "log").read_text()

    def end(self):
        """The exit code.

        Fails if the main thread sleeps for 4 s. Such a sleep shows a task that did not end, because kopf waits 5 s for
        such tasks.
        """
        began, busy_s = time.monotonic(), self._busy_s()
        end = os.pidfd_open(self.process.pid)
        select.select([end], [], [])  # the process has ended, and its files in /proc are still there
        os.close(end)
        slept_s = time.monotonic() - began - (self._busy_s() - busy_s)
        assert slept_s < 4, self.log()
        return self.process.wait()

    def _busy_s(self):
        """Seconds in which the main thread computed or waited for a processor."""
        computed_ns, waited_ns, _ = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        return (int(computed_ns) + int(waited_ns)) / 1e9

    def leads(self):
        return "rayloom_operator_leader 1.0" in self.get("/metrics")


@pytest.fixture
def cluster(tmp_path):
    """Yields a server and a function. The function starts an operator that uses the server."""
    operators = []

    def start(*more, port=0, is_fork=True):
        folder = tmp_path / str(len(operators))
        folder.mkdir()
        (folder / "kubeconfig").write_text((tmp_path / "kubeconfig").read_text())
        operators.append(Operator(folder, port or free_port(), *more, is_fork=is_fork))
        return operators[-1]

    with serving(tmp_path) as server:
        try:
            yield server, start
        finally:
            for operator in operators:
                operator.process.kill()
                operator.process.wait()


@pytest.fixture
def world(cluster):
    """The server, and an operator with its own interpreter. Operators of other tests are forks, which start faster."""
    server, start = cluster
    return server, start(is_fork=False)


def test_it_leads_works_and_releases_the_lease_when_it_is_stopped(world):
    server, operator = world
    kube = server.kube
    operator.until(operator.leads)
    operator.until(lambda: (operator.get("/healthz"), operator.get("/readyz")) == ("ok", "ok"))
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


def test_a_standby_reads_services_only_once_it_leads(cluster):
    server, start = cluster
    kube = server.kube
    first = start()
    first.until(first.leads)
    server.put(service())
    first.until(lambda: kube.statuses)
    second = start()
    second.until(lambda: second.get("/readyz") == "ok")
    num_lists = kube.lists.count(SERVICES)
    server.put(service(replicas=2))
    first.until(lambda: kube.statuses[-1]["observedGeneration"] == 2)
    assert kube.lists.count(SERVICES) == num_lists
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0
    second.until(second.leads)
    server.put(service(replicas=3))
    second.until(lambda: kube.statuses[-1]["observedGeneration"] == 3)
    assert kube.lists.count(SERVICES) > num_lists


def test_a_standby_that_is_stopped_ends_without_a_warning(cluster):
    _, start = cluster
    first = start()
    first.until(first.leads)
    second = start()
    second.until(lambda: second.get("/readyz") == "ok")
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 0
    assert {json.loads(line)["level"] for line in second.log().splitlines()} == {"info"}


def test_a_port_that_is_taken_ends_the_start_and_is_named(cluster):
    _, start = cluster
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        operator = start(port=port)
        assert operator.process.wait(60) == 1
    assert operator.log().splitlines()[-1].startswith(f"rayloom-operator: cannot listen on port {port}: ")
    assert "Traceback" not in operator.log()


def test_it_serves_the_services_of_its_namespaces_alone(cluster):
    server, start = cluster
    server.put(service())
    other = service()
    other["metadata"] |= {"namespace": "other", "uid": "uid-other"}
    server.put(other)
    operator = start("--watch-namespaces=team,third")
    operator.until(lambda: server.kube.statuses)
    operator.until(lambda: "rayloom_operator_queue_depth 0.0" in operator.get("/metrics"))
    assert {path.split("/")[5] for _, path in server.kube.calls if "llmservices" in path} == {"team"}
    assert SERVICES not in server.kube.lists
