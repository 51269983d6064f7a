"""docs/status.md shows the output of kubectl for four services. This test writes the page.

Times, versions and random suffixes are replaced, so the page changes only with the messages. If the messages change,
the test fails once, and the new page must be committed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from api.namespaces import llm_service
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import REPOSITORY
from operator_processes.process import wait_until
from rayloom_operator.api.status import Reason
from real_api_server.world import World
from simulated_nodes.pod_status import Play

_PAGE = REPOSITORY / "docs" / "status.md"
_NAMESPACE = "team"
_PATH = f"/api/v1/namespaces/{_NAMESPACE}"
_SERVICES = ("healthy", "progressing", "refused", "degraded")
_MODEL = {"source": "builtin://smollm2-135m"}
_SETTLED_S = 60.0


@pytest.fixture
def shown(world: World) -> Iterator[None]:
    """Four services in four states."""
    world.operator()
    wait_until(lambda: world.get(_PATH) is None, "the namespace of an earlier run to go")
    namespace = {"metadata": {"name": _NAMESPACE, "labels": {"rayloom.dev/e2e": "true"}}}
    world.request("POST", "/api/v1/namespaces", namespace)
    world.play(_NAMESPACE, "progressing", "worker", Play(waiting=("ContainerCreating", "")))
    service = {"metadata": {"name": "refused"}, "spec": {"ports": [{"port": 80}]}}
    world.request("POST", f"{_PATH}/services", service)
    for name in _SERVICES:
        world.create(llm_service(_NAMESPACE, name, model=_MODEL, parallelism={"pipeline": 2}))
    world.wait_serving(_NAMESPACE, "healthy")
    world.wait_serving(_NAMESPACE, "degraded")
    world.play(_NAMESPACE, "degraded", "worker", Play(is_oom=True))
    world.engine(_NAMESPACE, "degraded", state="recovering", reason="rank 1 was lost")
    world.wait(_NAMESPACE, "progressing", "Available", Reason.STARTING)
    world.engine(_NAMESPACE, "progressing", loading=(41_000_000_000, 131_000_000_000))
    world.wait(_NAMESPACE, "refused", "Accepted", Reason.APPLY_REFUSED)
    world.wait(_NAMESPACE, "degraded", "Available", Reason.CONTAINER_FAILED)
    yield
    world.delete(_PATH)


def test_the_page_shows_what_kubectl_says(shown: None, world: World, kubectl: Kubectl) -> None:
    def events() -> str:
        return kubectl("get", "events", "--namespace", _NAMESPACE)

    wait_until(lambda: "ContainerFailed" in events() and "ApplyRefused" in events(), "the events")
    before = page = _PAGE.read_text()

    def is_same() -> bool:
        nonlocal page
        page = _page(kubectl, before)
        return _essence(page) == _essence(before)

    # The operator writes a changed message and the loaded bytes with a delay of up to five seconds.
    with contextlib.suppress(AssertionError):
        wait_until(is_same, "the page", _SETTLED_S)
    if _essence(page) != _essence(before):
        _PAGE.write_text(page)
    assert _essence(page) == _essence(before), "docs/status.md was rewritten: check and commit it"


def _page(kubectl: Kubectl, before: str) -> str:
    """The page with the present outputs of kubectl."""
    outputs = {"get": kubectl("get", "llm", "--namespace", _NAMESPACE)}
    outputs |= {name: kubectl("describe", "llm", name, "--namespace", _NAMESPACE) for name in _SERVICES}
    page = before
    for name, output in outputs.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        head, tail = page.split(start, 1)
        page = f"{head}{start}\n```text\n{_plain(output)}\n```\n\n{end}{tail.split(end, 1)[1]}"
    return page


def _essence(page: str) -> list[list[str]]:
    """The words of each line. Events are left out, because their number depends on the order of observations."""
    kept = re.sub(r"(?ms)^Events:.*?^```$", "", page)
    return [line.split() for line in kept.splitlines()]


def _plain(output: str) -> str:
    """The output, with fixed values instead of the parts that differ between runs."""
    for pattern, instead in (
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-01T12:00:00Z"),
        (r"(Resource Version:  +)\d+", r"\g<1>1234"),
        (r"(UID:  +)\S+", r"\g<1>5f0c0f6e-8f6b-4c57-9d8e-000000000000"),
        (r"(-(?:head|engine-worker))-[a-z0-9]{5}", r"\1-x7k2p"),
        (r"standin-", "node-"),
        # Ages are at the end of a line of `get` and in the third column of an Event.
        (r"(?m)(:8000 +)(?:\d+[hms])+ *$", r"\g<1>1m"),
        (r"(?m)^(  (?:Normal|Warning) +\S+ +)(?:\d+[hms])+( +)", r"\g<1>1m\2"),
    ):
        output = re.sub(pattern, instead, output)
    head, line, events = output.rstrip().partition("  -------\n")
    # The order of Events within a second is random.
    return "\n".join(each.rstrip() for each in [*(head + line).splitlines(), *sorted(events.splitlines())])
