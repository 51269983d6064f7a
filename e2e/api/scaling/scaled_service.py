"""An autoscaled LLMService on the real API server, for the tests of this folder.

The tests of a module run in parallel (../parallel_tests.py), each in a namespace of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from api.namespaces import delete_services, llm_service, new_namespace
from api.parallel_tests import ParallelTests, parallel_tests
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.process import OperatorProcess, wait_for, wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import Document

# Every module has fewer tests than this, so all tests of a module run at the same time.
_NUM_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """The argument of a test. All tests of a module share the operator."""

    world: World
    operator: OperatorProcess
    namespace: str

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.world.kubeconfig)


def parallel_scaling(world: World, request: pytest.FixtureRequest) -> Iterator[ParallelTests]:
    """The fixture `started_tests` of a module. Each test has its own namespace."""
    operator = world.operator()
    namespaces: list[str] = []

    def setting(number: int) -> Setting:
        namespaces.append(new_namespace(world, f"scaling-{number}"))
        return Setting(world, operator, namespaces[-1])

    with parallel_tests(request, setting, _NUM_AT_ONCE) as tests:
        yield tests
    for namespace in namespaces:
        delete_services(world, namespace)


class ScaledService:
    """The service `chat` of a namespace. The constructor returns when the service serves."""

    def __init__(self, setting: Setting, **spec: Any) -> None:
        self.world = world = setting.world
        self.namespace = namespace = setting.namespace
        # The service is created by POST instead of server-side apply. For an applied service, the API server would
        # record no field manager for writes to the scale subresource.
        path = f"{LLM}/namespaces/{namespace}/llmservices"
        self.path = f"{path}/chat"
        world.request("POST", path, llm_service(namespace, "chat", **spec), fieldValidation="Strict")
        world.wait_serving(namespace, "chat")

    @property
    def document(self) -> Document:
        """The service, as the watch last reported it. A GET for each check would load the API server."""
        return self.world.services[(self.namespace, "chat")]

    @property
    def replicas(self) -> int:
        return int(self.document["spec"]["replicas"])

    @property
    def scaling(self) -> Document:
        found: Document = self.document.get("status", {}).get("autoscaling", {})
        return found

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, f"{self.namespace}: {what}", story=self._story)

    def wait_scaled(self, reason: str, says: str = "") -> Document:
        """Waits until status.autoscaling has this reason, and `says` in its message. Returns status.autoscaling.

        The operator writes status.autoscaling after `replicas`.
        """

        def matching() -> Document | None:
            found = self.scaling
            return found if found.get("reason") == reason and says in found["message"] else None

        return wait_for(matching, f"{self.namespace}: the reason {reason} {says!r}", story=self._story)

    def stays(self, seconds: float) -> bool:
        """Returns whether `replicas` keeps its value for this time.

        No event shows that a write does not come, so the whole time must pass.
        """
        number, end = self.replicas, time.monotonic() + seconds
        while time.monotonic() < end:
            if self.replicas != number:
                return False
            time.sleep(0.5)
        return True

    def _story(self) -> str:
        status = self.document.get("status", {})
        shown = {name: status.get(name) for name in ("autoscaling", "gateway", "rollout")}
        return f"{json.dumps(shown, indent=1)}\n{self.world.story()}"
