"""What the end-to-end tests start from.

    cluster      a Cluster (cluster/interface.py): kubeconfig, load_image(name), node_names(), stop_node(name),
                 start_node(name)
    kubectl      kubectl("get", "pods") gives text, kubectl.json("get", "llm", "--namespace", ns) gives it parsed,
                 kubectl.apply({...}, ...) applies dictionaries server-side, kubectl.succeeds(...) gives a bool
    operator     the same kubectl, in a cluster that has the images and the operator in namespace rayloom-system
    namespace    the name of a new namespace, removed with everything in it after the test
    client       a pod in `namespace` to send requests from: client.request("http://svc:8000/v1/models") gives
                 (status, body), with a second argument it posts that as JSON; client.python("code") gives what the
                 code printed

A cluster that is up, an image that is built and a release that is installed are taken as they are, so a second run
starts at once: `make cluster-down` takes them away. E2E_CLUSTER=kind runs on Docker; E2E_KUBECONFIG=PATH on a cluster
that is there. When a test fails, logs, events and objects are in artifacts/TEST; the namespace is removed all the same.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.choice import chosen_cluster
from cluster.dump import dump_cluster
from cluster.images import OPERATOR
from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from cluster.prepare import prepare

if TYPE_CHECKING:
    from roll import Roll
    from streams import Seen

ARTIFACTS = Path(__file__).parent / "artifacts"
_NAMESPACE_ENDS_S = 60.0
_measured: list[str] = []
_rolls: list[str] = []
_HEADER = (
    "| fault | s to the next token of a running stream | s to Available | failed requests | failed probes |",
    "|---|---|---|---|---|",
)

_REQUEST = """
import json, sys, urllib.error, urllib.request
url, body, timeout_s = json.load(sys.stdin)
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        status, content = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, content = error.code, error.read()
except OSError as error:
    status, content = 0, str(error).encode()
print(json.dumps([status, content.decode(errors="replace")]))
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A pod that sends requests as any other pod of its namespace would."""

    kubectl: Kubectl
    namespace: str
    name: str = "client"

    @classmethod
    def start(cls, kubectl: Kubectl, namespace: str, name: str = "client", node: str = "") -> Client:
        """A running pod of this name, on this node or on any."""
        image = OPERATOR.name.removeprefix("docker.io/")
        container: dict[str, Any] = {"name": "client", "image": image, "command": ["sleep", "infinity"]}
        # Its clock decides what counts as late, so it is not to wait for busy neighbours.
        container["resources"] = {"requests": {"cpu": "200m", "memory": "64Mi"}}
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
        if node:
            pod["spec"]["nodeName"] = node
        kubectl.apply(pod)
        wait = ("wait", "--namespace", namespace, "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
        kubectl(*wait, timeout_s=70)
        return cls(kubectl, namespace, name)

    def python(self, code: str, stdin: bytes | None = None, timeout_s: float = 60) -> str:
        command = ("exec", "--stdin", "--namespace", self.namespace, self.name, "--", "python3", "-c", code)
        return self.kubectl(*command, stdin=stdin or b"", timeout_s=timeout_s + 10)

    def request(self, url: str, json_body: object = None, timeout_s: float = 60) -> tuple[int, str]:
        """Status and body; a POST when there is a body to send. Status 0 and the reason when nobody answered."""
        question = json.dumps([url, json_body, timeout_s]).encode()
        status, content = json.loads(self.python(_REQUEST, question, timeout_s))
        return status, content


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return chosen_cluster(os.environ)


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[Kubectl]:
    if not os.environ.get("E2E_PREPARED"):  # `make e2e` has done it just now
        prepare(cluster)
    kubectl = Kubectl(cluster.kubeconfig)
    # What a run that was killed left.
    delete = ("delete", "namespace", "--selector", "rayloom.dev/e2e=true", "--timeout=120s")
    kubectl(*delete, timeout_s=130)
    yield kubectl
    # Nothing of ours keeps a namespace from its end. What watches over that looks again only after half of a pod's
    # grace period, so those of the last tests may need a little longer.
    selected = kubectl.json("get", "namespaces", "--selector", "rayloom.dev/e2e=true")["items"]
    deleted = {one["metadata"]["name"]: one["metadata"].get("deletionTimestamp") for one in selected}
    assert [name for name, at in deleted.items() if at is None or _age_s(at) > _NAMESPACE_ENDS_S] == []


def _age_s(timestamp: str) -> float:
    """Seconds since a time as Kubernetes writes it."""
    return time.time() - calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ"))


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Kubectl:
    if not os.environ.get("E2E_PREPARED"):
        cluster.up("full")
    return Kubectl(cluster.kubeconfig)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Seen], None]:
    """Prints what became of a fault, and keeps a line of it for the table at the end."""

    def shown(what: str, seen: Seen) -> None:
        _measured.append(seen.row(what))
        with capsys.disabled():
            print(f"\n{seen.timeline.table()}")
            for problem in (*seen.failures, *seen.lies):
                print(f"  FAILED: {problem[:1000]}")

    return shown


@pytest.fixture
def show_roll(capsys: pytest.CaptureFixture[str]) -> Callable[[Roll], None]:
    """Prints what became of a change, and keeps a line of it for the table at the end."""

    def shown(seen: Roll) -> None:
        _rolls.append(seen.row())
        with capsys.disabled():
            pause_s, at = seen.longest_pause
            print(f"\n{seen.timeline.table()}\n  longest pause of the prober: {pause_s:.1f} s, from {at:.1f} s on")
            for failure in seen.failures:
                print(f"  FAILED at {seen.timeline.seconds(failure.began):.1f} s: {failure.what[:1000]}")
            for lie in seen.lies:
                print(f"  UNTRUE: {lie}")

    return shown


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds from each fault and of each roll; also in artifacts/faults.md and artifacts/rolls.md."""
    from roll import HEADER

    for name, header, rows in (("faults", _HEADER, _measured), ("rolls", HEADER, _rolls)):
        if rows:
            table = "\n".join([*header, *rows]) + "\n"
            ARTIFACTS.mkdir(exist_ok=True)
            (ARTIFACTS / f"{name}.md").write_text(table)
            terminalreporter.write(f"\n{table}")


@contextlib.contextmanager
def new_namespace(kubectl: Kubectl, purpose: str) -> Iterator[str]:
    """A namespace whose pods are gone afterwards, whatever happened: the next test wants the memory and the cores.

    It goes itself a little later: what watches over that looks again only after half of a pod's grace period.
    """
    name = f"e2e-{_slug(purpose)[:40].strip('-')}-{time.time_ns() // 1_000_000 % 100_000}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "rayloom.dev/e2e=true")
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        # Now, and not when the namespace's controller comes to pods; nobody can make new ones any more. How they end in
        # order is what other tests look at.
        kubectl("delete", "pods", "--all", "--now", "--namespace", name, "--timeout=120s", timeout_s=130)


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    with new_namespace(kubectl, request.node.name) as name:
        yield name


@pytest.fixture
def client(kubectl: Kubectl, namespace: str) -> Client:
    return Client.start(kubectl, namespace)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # those of `pytest -n` begin while others write
        shutil.rmtree(ARTIFACTS, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Before the fixtures take away what failed, but for those that fail to.
    if report.failed:
        for index, used in enumerate(_clusters(item)):
            folder = ARTIFACTS / _slug(f"{item.name} {call.when if call.when == 'teardown' else ''} {index or ''}")
            try:
                dump_cluster(used, folder)
            except Exception as error:  # noqa: BLE001 -- an error in a hook would end the whole session
                print(f"no dump in {folder}: {error!r}")
    return report


def _clusters(item: pytest.Item) -> list[Cluster]:
    """Those of the test's fixtures, and the usual one where a fixture failed before it was there."""
    found = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Cluster)]
    if not found and "cluster" in getattr(item, "fixturenames", ()):
        return [chosen_cluster(os.environ)]
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
