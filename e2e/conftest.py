"""Fixtures of all end-to-end tests, and a dump of the cluster for each failed test.

    cluster      a Cluster (local_kubernetes/clusters/interface.py): kubeconfig, load_image(name), node_names(),
                 stop_node(name), start_node(name)
    kubectl      kubectl("get", "pods") returns text, kubectl.json("get", "llm", "--namespace", ns) returns an object,
                 kubectl.apply({...}, ...) applies dictionaries server-side, kubectl.succeeds(...) returns a bool
    operator     the same kubectl, in a cluster that has the images and the operator in namespace rayloom-system
    namespace    the name of a new namespace, deleted with all its objects after the test
    client       a pod in `namespace` to send requests from: client.request("http://svc:8000/v1/models") returns
                 (status, body), and posts a second argument as JSON; client.python("code") returns the
                 standard output of the code

A running cluster, a built image and an installed release are reused, so a second run starts at once. `make
cluster-down` removes them. E2E_CLUSTER=kind uses kind on Docker; E2E_KUBECONFIG=PATH uses an existing cluster. When a
test fails, logs, events and objects are written to artifacts/FOLDER/TEST, before the test's namespace is deleted.
FOLDER is the folder of the test, because `.ci/run` runs the tests of api/ and tool/ at the same time.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from clients.client_pod import Client
from clients.kept_kubectl import KeptKubectl
from clients.namespaces import new_namespace, slug
from clients.service import wait
from local_kubernetes.clusters.choice import chosen_cluster
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.dump import dump_cluster
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.prepare import prepare

_HERE = Path(__file__).parent
ARTIFACTS = _HERE / "artifacts"
# The namespace controller checks a terminating namespace again after half of the longest grace period of its pods. If
# the namespace then still has other objects, the controller checks once more 8 s later.
_NAMESPACE_ENDS_S = 90.0
_NAMESPACE_WAIT_S = 180.0


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return chosen_cluster(os.environ)


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[Kubectl]:
    if not os.environ.get("E2E_PREPARED"):  # `make e2e` has run `prepare` just before
        prepare(cluster)
    with contextlib.closing(KeptKubectl(cluster.kubeconfig)) as kubectl:
        # A killed run may have left namespaces.
        delete = ("delete", "namespace", "--selector", "rayloom.dev/e2e=true", "--timeout=120s")
        kubectl(*delete, timeout_s=130)
        yield kubectl
        # No finalizer of ours may keep a namespace. The namespaces of the last tests may still be terminating.
        wait(lambda: _kept_namespaces(kubectl) == [], _NAMESPACE_WAIT_S, lambda: f"kept: {_kept_namespaces(kubectl)}")


def _kept_namespaces(kubectl: Kubectl) -> list[str]:
    """Test namespaces that nobody has deleted, or whose deletion takes more than _NAMESPACE_ENDS_S."""
    selected = kubectl.json("get", "namespaces", "--selector", "rayloom.dev/e2e=true")["items"]
    deleted = {one["metadata"]["name"]: one["metadata"].get("deletionTimestamp") for one in selected}
    return [name for name, at in deleted.items() if at is None or _age_s(at) > _NAMESPACE_ENDS_S]


def _age_s(timestamp: str) -> float:
    """Seconds since a time in Kubernetes' notation."""
    return time.time() - calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ"))


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    if not os.environ.get("E2E_PREPARED"):
        cluster.up("full")
    with contextlib.closing(KeptKubectl(cluster.kubeconfig)) as kubectl:
        yield kubectl


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    with new_namespace(kubectl, request.node.name) as name:
        yield name


@pytest.fixture
def client(kubectl: Kubectl, namespace: str) -> Client:
    return Client.start(kubectl, namespace)


def pytest_configure(config: pytest.Config) -> None:
    # workers of `pytest -n` do not clear the folder, because other workers may have written into it already
    if not hasattr(config, "workerinput"):
        for path in (Path(each.partition("::")[0]).resolve() for each in config.args):
            if path.is_relative_to(_HERE):
                shutil.rmtree(ARTIFACTS / _folder_of(path), ignore_errors=True)


def _folder_of(path: Path) -> str:
    """The folder of tests to which the path belongs; empty if the path contains all folders."""
    return next(iter(path.relative_to(_HERE).parts), "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # At this point the fixtures of a failed test still exist, except after a failure in a fixture's clean-up.
    if report.failed:
        for index, used in enumerate(_clusters(item)):
            name = slug(f"{item.name} {call.when if call.when == 'teardown' else ''} {index or ''}")
            folder = ARTIFACTS / _folder_of(item.path) / name
            try:
                dump_cluster(used, folder)
            except Exception as error:  # noqa: BLE001 -- an error in a hook would end the whole session
                print(f"no dump in {folder}: {error!r}")
    return report


def _clusters(item: pytest.Item) -> list[Cluster]:
    """The clusters among the test's fixtures, or the default cluster if the fixture `cluster` failed."""
    found = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Cluster)]
    if not found and "cluster" in getattr(item, "fixturenames", ()):
        return [chosen_cluster(os.environ)]
    return found
