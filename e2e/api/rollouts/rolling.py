"""A service with a rollout: actions on it, and queries for assertions.

The tests of a module run in parallel (../parallel_tests.py), each with a service of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.namespaces import delete_services, llm_service, new_namespace
from api.parallel_tests import ParallelTests, parallel_tests
from operator_processes.process import OperatorProcess, wait_for, wait_until
from operator_processes.proxy import Request
from real_api_server.traffic import SLICE_LABEL, Traffic, ready_addresses
from real_api_server.world import LLM, World
from simulated_nodes.api_client import Document
from simulated_nodes.engines import Engine
from simulated_nodes.pod_status import Play, Release

GOOD, BETTER, BEST = "acme/engine:1", "acme/engine:2", "acme/engine:3"
CRASHES, FAILS, SLOW, NEVER = "acme/engine:crashes", "acme/engine:fails", "acme/engine:slow", "acme/engine:never"
RELEASES = {
    CRASHES: Release(play=Play(ended=(1, "ImportError: no module named attention"), is_restarted=True)),
    FAILS: Release(engine={"is_failing": True}),
    SLOW: Release(engine={"first_token_s": 0.9}),
    NEVER: Release(engine={"state": "starting"}),
}
# An analysis whose hold is long enough for some requests.
ANALYSIS = {"holdSeconds": 2, "minRequests": 4}
LONG = {"holdSeconds": 600, "minRequests": 4}
# More parallel tests would only wait for KubeRay, which creates the pods of one RayCluster after the other.
_NUM_AT_ONCE = 6


class Service:
    """An LLMService that `start` creates."""

    def __init__(self, world: World, namespace: str, name: str, operator: OperatorProcess | None = None) -> None:
        self.world = world
        self.namespace = namespace
        self.name = name
        self.key = (namespace, name)
        self._operator = operator
        self._spec: dict[str, Any] = {}
        self._image = GOOD
        self._applied_generation = 0
        for image, release in RELEASES.items():
            world.ship(image, release)

    def start(self, **spec: Any) -> None:
        """Creates the service. Returns once all its engine replicas serve and no rollout runs."""
        self.world.history.ever.pop(self.key, None)  # a killed run may have left records of this name
        self.apply(GOOD, **{"rollout": {"analysis": ANALYSIS}, **spec})
        self.wait_complete()
        self.world.history.most[self.key] = len(self.clusters)

    def apply(self, image: str = "", **spec: Any) -> None:
        """Applies the manifest with these changes."""
        self._image = image or self._image
        self._spec |= spec
        engine = {**self._spec.get("engine", {}), "image": self._image}
        made = self.world.create(llm_service(self.namespace, self.name, **{**self._spec, "engine": engine}))
        self._applied_generation = made["metadata"]["generation"]

    @property
    def status(self) -> Document:
        found: Document = self.world.services.get(self.key, {}).get("status", {})
        return found

    def condition(self, kind: str) -> Document:
        """The condition for the last applied spec or a later one; empty until the operator has observed such a spec."""
        found = self.world.condition(*self.key, kind)
        return found if found.get("observedGeneration", 0) >= self._applied_generation else {}

    @property
    def _generation(self) -> int:
        # Read from the API server, since a watch may lag.
        path = f"{LLM}/namespaces/{self.namespace}/llmservices/{self.name}"
        return int(self.world.request("GET", path)["metadata"]["generation"])

    def wait(self, kind: str, reason: str) -> Document:
        """Waits until the condition for the present spec has this reason. Returns the condition of that moment."""
        generation = self._generation

        def matching() -> Document | None:
            found = self.world.condition(*self.key, kind)
            return found if (found.get("reason"), found.get("observedGeneration")) == (reason, generation) else None

        return wait_for(matching, f"{self.key}: {kind} with reason {reason}", story=self._story)

    def wait_complete(self) -> None:
        """Returns once all engine replicas are of the spec's revision and serve, and no other replica exists.

        Asserts that the EndpointSlices, by which clients find engines, have one address for each of these replicas.
        """
        self.wait("Progressing", "Complete")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        slices = self.world.request("GET", path, labelSelector=f"{SLICE_LABEL}={self.name}")["items"]
        found = [address for each in slices for address in ready_addresses(each)]
        replicas = self._spec.get("replicas", 1)
        self.wait_until(lambda: len(self.clusters) == replicas, f"{replicas} RayClusters")
        assert self.status["currentRevision"] == self.status["updateRevision"]
        assert len(found) == replicas, f"{self.name}: complete, and clients find {found}"

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, f"{self.name}: {what}", story=self._story)

    def _story(self) -> str:
        return f"{json.dumps(self.status, indent=1)}\n{self.clusters}\n{self.world.story()}"

    @property
    def clusters(self) -> list[str]:
        """Names of existing RayClusters, by the watch."""
        return sorted(self.world.history.clusters[self.key])

    @property
    def most(self) -> int:
        """The largest number of simultaneous RayClusters since `start`."""
        return self.world.history.most[self.key]

    @property
    def num_ever(self) -> int:
        """The number of RayClusters that were ever created for the service."""
        return len(self.world.history.ever[self.key])

    @property
    def pods(self) -> set[str]:
        """Uids of the service's pods."""
        return {each["metadata"]["uid"] for each in self.world.pods(*self.key)}

    @property
    def num_held(self) -> int:
        """The number of pods that the service's PodDisruptionBudgets protect."""
        found = self.world.objects(*self.key, "poddisruptionbudgets").values()
        return sum(each["spec"]["minAvailable"] for each in found)

    def engine(self, cluster: str) -> Engine:
        return self.world.engines_of(*self.key)[cluster]

    @property
    def routed(self) -> set[str]:
        """Names of RayClusters whose head has the route label."""
        labels = [each["metadata"]["labels"] for each in self.world.pods(*self.key)]
        return {each["ray.io/cluster"] for each in labels if each.get("rayloom.dev/route") == "true"}

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Clients that send requests at a steady rate. Some requests have arrived when the block begins."""
        with self.world.traffic(*self.key) as traffic:
            self.wait_until(lambda: traffic.num_sent > 5, "requests to arrive")
            yield traffic

    def writes(self, method: str, part: str, since: float = 0.0) -> list[Request]:
        """The operator's successful writes with this method and with `part` in their path."""
        assert self._operator is not None
        writes = self._operator.proxy.writes(part, since)
        return [each for each in writes if each.method == method and 200 <= each.code < 300]

    def deletion(self, cluster: str) -> Request:
        """The first deletion of a RayCluster. A stale cache may cause a second deletion."""
        return self.writes("DELETE", f"/namespaces/{self.namespace}/rayclusters/{cluster}")[0]

    def routings(self, cluster: str) -> list[Request]:
        """The changes of the route label of the cluster's head pod, in order.

        A stale cache may cause a patch that changes nothing.
        """
        writes = self.writes("PATCH", f"/namespaces/{self.namespace}/pods/{cluster}-")
        before = [None, *(each.labels for each in writes)]
        return [each for each, labels in zip(writes, before, strict=False) if each.labels != labels]

    def warnings(self) -> set[str]:
        """Reasons of the service's Events of type Warning."""
        events = self.world.request("GET", f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        own = [each for each in events if each["regarding"].get("name") == self.name and each["type"] == "Warning"]
        return {each["reason"] for each in own}


def went_by_the_book(service: Service, cluster: str, engine: Engine) -> None:
    """Asserts the order of an engine replica's end: no route, no endpoint, a drain, no request, deletion."""
    # The operator may request the drain more than once before the engine's status shows it.
    drained_at = engine.drains[0][0]
    assert {method for _, method in engine.drains} == {"POST"}
    assert engine.found_at_drain == (), "clients found it when its drain began"
    assert service.routings(cluster)[-1].at < drained_at < service.deletion(cluster).at
    assert engine.num_in_flight == 0


def parallel_rolls(world: World, request: pytest.FixtureRequest) -> Iterator[ParallelTests]:
    """The fixture `started_tests` of a module. All its services are in one namespace."""
    operator = world.operator()
    namespace = new_namespace(world, "rolls")

    def service(number: int) -> Service:
        return Service(world, namespace, f"roll-{number}", operator)

    with parallel_tests(request, service, _NUM_AT_ONCE) as tests:
        yield tests
    delete_services(world, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods"
    # Some engines fill a node, so the pods of the next tests fit only after these pods have ended.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not world.request("GET", path)["items"], "the end of all pods", pause_s=0.3)
