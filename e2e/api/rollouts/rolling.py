"""One service that rolls: what a test does to it, and what it can say of it afterwards.

Rolls wait more than they work, so several of a module go on at once, each in a thread and with a service of its own;
`scene` makes a test of what one of them does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from api.namespaces import llm_service, new_namespace
from operator_processes.process import OperatorProcess, wait_until
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
# Long enough for some requests, short enough for a test.
ANALYSIS = {"holdSeconds": 2, "minRequests": 4}
LONG = {"holdSeconds": 600, "minRequests": 4}
_PATIENCE_S = 120.0
# With more of them KubeRay, which makes pods for one RayCluster after the other, is what all wait for.
_NUM_AT_ONCE = 6


class Service:
    """An LLMService of `image`, once it is started."""

    def __init__(self, world: World, namespace: str, name: str, operator: OperatorProcess | None = None) -> None:
        self.world = world
        self.namespace = namespace
        self.name = name
        self.key = (namespace, name)
        self._operator = operator
        self._spec: dict[str, Any] = {}
        self._image = GOOD
        for image, release in RELEASES.items():
            world.ship(image, release)

    def start(self, **spec: Any) -> None:
        """Returns once it serves with all its engines, and has no roll."""
        self.world.history.ever.pop(self.key, None)  # of a namespace that a killed run left
        self.apply(GOOD, **{"rollout": {"analysis": ANALYSIS}, **spec})
        self.wait_complete()
        self.world.history.most[self.key] = len(self.clusters)

    def apply(self, image: str = "", **spec: Any) -> None:
        """Changes these fields of the manifest, and applies it."""
        self._image = image or self._image
        self._spec |= spec
        engine = {**self._spec.get("engine", {}), "image": self._image}
        self.world.create(llm_service(self.namespace, self.name, **{**self._spec, "engine": engine}))

    @property
    def status(self) -> Document:
        found: Document = self.world.services.get(self.key, {}).get("status", {})
        return found

    def condition(self, kind: str) -> Document:
        """As it is of the spec that is now there; empty while it is not."""
        found = self.world.condition(*self.key, kind)
        return found if found.get("observedGeneration") == self._generation else {}

    @property
    def _generation(self) -> int:
        # Of the API server: a watch may be behind.
        path = f"{LLM}/namespaces/{self.namespace}/llmservices/{self.name}"
        return int(self.world.request("GET", path)["metadata"]["generation"])

    def wait(self, kind: str, reason: str, timeout_s: float = _PATIENCE_S) -> Document:
        """The condition, once it has the reason for the spec that is now there."""
        generation = self._generation

        def is_so() -> bool:
            found = self.world.condition(*self.key, kind)
            return (found.get("reason"), found.get("observedGeneration")) == (reason, generation)

        self.wait_until(is_so, f"{kind} with reason {reason}", timeout_s)
        return self.world.condition(*self.key, kind)

    def wait_complete(self, timeout_s: float = _PATIENCE_S) -> None:
        """Returns once all engines are of the spec's revision and serve, and nothing of another is left.

        What the status says by then has to be so for clients, too.
        """
        self.wait("Progressing", "Complete", timeout_s)
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        slices = self.world.request("GET", path, labelSelector=f"{SLICE_LABEL}={self.name}")["items"]
        found = [address for each in slices for address in ready_addresses(each)]
        replicas = self._spec.get("replicas", 1)
        self.wait_until(lambda: len(self.clusters) == replicas, f"{replicas} RayClusters", timeout_s)
        assert self.status["currentRevision"] == self.status["updateRevision"]
        assert len(found) == replicas, f"{self.name}: complete, and clients find {found}"

    def wait_until(self, is_so: Callable[[], object], what: str, timeout_s: float = _PATIENCE_S) -> None:
        wait_until(is_so, f"{self.name}: {what}", timeout_s, self._story)

    def _story(self) -> str:
        return f"{json.dumps(self.status, indent=1)}\n{self.clusters}\n{self.world.story()}"

    @property
    def clusters(self) -> list[str]:
        """The RayClusters that are there, by the watch."""
        return sorted(self.world.history.clusters[self.key])

    @property
    def most(self) -> int:
        """RayClusters at one time, since the service was started."""
        return self.world.history.most[self.key]

    @property
    def num_ever(self) -> int:
        """RayClusters that were ever made of it."""
        return len(self.world.history.ever[self.key])

    @property
    def pods(self) -> set[str]:
        """Their uids."""
        return {each["metadata"]["uid"] for each in self.world.pods(*self.key)}

    @property
    def num_held(self) -> int:
        """Pods that the PodDisruptionBudget keeps."""
        found = self.world.objects(*self.key, "poddisruptionbudgets").values()
        return sum(each["spec"]["minAvailable"] for each in found)

    def engine(self, cluster: str) -> Engine:
        return self.world.engines_of(*self.key)[cluster]

    @property
    def routed(self) -> set[str]:
        """The RayClusters whose heads have the route label."""
        labels = [each["metadata"]["labels"] for each in self.world.pods(*self.key)]
        return {each["ray.io/cluster"] for each in labels if each.get("rayloom.dev/route") == "true"}

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Clients ask, and some have been answered when this begins."""
        with self.world.traffic(*self.key) as traffic:
            self.wait_until(lambda: traffic.num_sent > 5, "requests to arrive")
            yield traffic

    def writes(self, method: str, part: str, since: float = 0.0) -> list[Request]:
        """Those of the operator that the API server granted."""
        assert self._operator is not None
        return [each for each in self._operator.proxy.writes(part, since) if each.method == method and each.code < 300]

    def deletion(self, cluster: str) -> Request:
        """The first one of a RayCluster; a watch that is behind may cause another."""
        return self.writes("DELETE", f"/namespaces/{self.namespace}/rayclusters/{cluster}")[0]

    def routings(self, cluster: str) -> list[Request]:
        """The changes of the route label of its head, in their order."""
        return self.writes("PATCH", f"/namespaces/{self.namespace}/pods/{cluster}-")

    def warnings(self) -> set[str]:
        """The reasons of what `kubectl describe` would warn of."""
        events = self.world.request("GET", f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        own = [each for each in events if each["regarding"].get("name") == self.name and each["type"] == "Warning"]
        return {each["reason"] for each in own}


def went_by_the_book(service: Service, cluster: str, engine: Engine) -> None:
    """Asserts in which order an engine went: no route, no endpoint, a drain, no request, deletion."""
    # It may be told more than once, before it says that it drains.
    drained_at = engine.drains[0][0]
    assert {method for _, method in engine.drains} == {"POST"}
    assert engine.found_at_drain == (), "clients found it when its drain began"
    assert service.routings(cluster)[-1].at < drained_at < service.deletion(cluster).at
    assert engine.num_in_flight == 0


Scene = Callable[[Service], None]
_scenes: dict[str, Scene] = {}


def scene(play: Scene) -> Callable[[Stage], None]:
    """A test of the same name that waits for the end of `play`, which goes on on the stage."""
    _scenes[play.__name__] = play

    def test(stage: Stage) -> None:
        stage.result(play.__name__)

    test.__name__ = test.__qualname__ = play.__name__
    test.__module__ = play.__module__
    return test


class Stage:
    """All scenes that were asked for, in their order."""

    def __init__(self, world: World, names: list[str]) -> None:
        operator = world.operator()
        namespace = new_namespace(world, "rolls")
        self._path = f"/api/v1/namespaces/{namespace}"
        self._world = world
        self._threads = ThreadPoolExecutor(max_workers=_NUM_AT_ONCE)
        self._plays: dict[str, Future[None]] = {}
        for number, name in enumerate(names):
            service = Service(world, namespace, f"roll-{number}", operator)
            self._plays[name] = self._threads.submit(_scenes[name], service)

    def result(self, name: str) -> None:
        """Returns when it is over. Raises what it raised."""
        self._plays[name].result()

    def close(self) -> None:
        self._threads.shutdown()
        namespace = self._path.rpartition("/")[2]
        for name in [name for space, name in self._world.services if space == namespace]:
            self._world.delete(f"{LLM}/namespaces/{namespace}/llmservices/{name}")
        # A namespace that still has pods is looked at again only after half of their grace.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self._world.request("GET", f"{self._path}/pods")["items"], "the end of all pods", 60)
        self._world.delete(self._path)


def staged(world: World, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The fixture `stage` of a module with scenes: those that are to be run."""
    names = [item.name for item in request.session.items if item.path == request.path and item.name in _scenes]
    found = Stage(world, names)
    yield found
    found.close()
