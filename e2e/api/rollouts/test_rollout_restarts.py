"""A rollout, a rollback and a scale-down reach the same end state if the operator is killed after every write.

In test_restarts.py each kill has a service of its own. Here all kills happen to one service: each operator carries out
one more step and is killed. So each operator must find all state in the cluster. A write that changes nothing is no
step, because each new operator applies all existing objects again. An Event is no step, because no operator reads
Events. Each ConfigMap, Secret and ControllerRevision causes only one kill. An operator that finds no RayCluster writes
these objects before it creates the RayCluster. So with a kill at every such write, no operator would ever create the
RayCluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from api.end_state import wait_same_end
from api.rollouts.rolling import BETTER, CRASHES, Service
from operator_processes.process import OperatorProcess
from operator_processes.proxy import Request
from real_api_server.world import World

# Upper bound of the kills of a story. A story needs far fewer.
_MAX_KILLS = 60
_NUM_READY = 3  # started operators that wait
_MODEL = {"source": "builtin://smollm2-135m", "servedName": "chat"}  # `servedName` keeps the name out of the revision
_AHEAD = ("/configmaps", "/secrets", "/controllerrevisions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    begin: Callable[[Service], None]
    change: Callable[[Service], None]
    end: str  # reason of Progressing
    least_kills: int  # steps that every story must contain: status, creation, route, drain, deletion


STORIES = {
    "a roll": Story(
        begin=lambda service: service.start(model=_MODEL),
        change=lambda service: service.apply(BETTER),
        end="Complete",
        least_kills=10,
    ),
    "a rollback": Story(
        begin=lambda service: service.start(model=_MODEL),
        change=lambda service: service.apply(CRASHES),
        end="RolledBack",
        least_kills=6,
    ),
    "a scale-down": Story(
        begin=lambda service: service.start(model=_MODEL, replicas=2),
        change=lambda service: service.apply(replicas=1),
        end="Complete",
        least_kills=4,
    ),
}


@pytest.fixture
def alone(world: World) -> Iterator[None]:
    """Lets no operator run except those that the test starts."""
    world.stop_operators()
    yield
    world.stop_operators()


class Relay:
    """A sequence of operators, one of which works.

    After a call of `kill_at_steps`, the working operator is killed at its first write that changes something.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()  # the proxy's thread holds it until it has decided about a kill and killed
        self._versions: dict[str, str] = {}  # path -> resourceVersion after the last write
        self._kills = False
        self._is_killed = False
        self._steps: list[tuple[str, str]] = []  # steps at which an operator was killed
        self._waiting: list[OperatorProcess] = []
        self._current: OperatorProcess
        self.hand_over()

    @property
    def num_kills(self) -> int:
        return len(self._steps)

    @property
    def is_cut(self) -> bool:
        """True from the kill of the working operator on, also while its process still ends."""
        return self._is_killed or not self._current.is_alive

    def kill_at_steps(self, kills: bool) -> None:
        """Enables or disables kills. When `kill_at_steps(False)` returns, no operator is killed any more."""
        with self._lock:
            self._kills = kills

    def hand_over(self) -> None:
        """Releases the next of the started operators, which works from now on."""
        while len(self._waiting) <= _NUM_READY:
            self._waiting.append(self._world.start_operator(is_held=True))
        if self._is_killed:
            self._current.kill()  # waits for the end of its process, which only this thread may do
        self._current, self._is_killed = self._waiting.pop(0), False
        self._current.proxy.after_write = self._after_write
        self._world.take_lease()
        self._world.release(self._current.proxy)

    def _after_write(self, request: Request) -> None:
        """Runs in the thread of the operator's proxy."""
        with self._lock:
            self._kill_at_a_step(request)

    def _kill_at_a_step(self, request: Request) -> None:
        path = request.path.partition("?")[0]
        has_changed = request.method == "DELETE" or self._versions.get(path) != request.version
        self._versions[path] = request.version
        if not self._kills or request.code >= 300 or not has_changed or "/events" in path or self.is_cut:
            return
        if any(kind in path for kind in _AHEAD) and (request.method, path) in self._steps:
            return
        self._steps.append((request.method, path))
        self._is_killed = True
        self._current.process.kill()

    def story(self) -> str:
        return "\n".join(f"{method} {path}" for method, path in self._steps)


@pytest.mark.parametrize("name", STORIES)
def test_killed_after_every_write_the_end_is_the_same(name: str, world: World, alone: None, namespace: str) -> None:
    story, relay = STORIES[name], Relay(world)
    _act(story, Service(world, namespace, "chat-0"), relay, kills=False)
    _act(story, Service(world, namespace, "chat-1"), relay, kills=True)
    print(f"{name}: {relay.num_kills} kills\n{relay.story()}")
    wait_same_end(world, namespace, "chat-1", "chat-0")
    assert relay.num_kills >= story.least_kills


def _act(story: Story, service: Service, relay: Relay, *, kills: bool) -> None:
    """Plays the story, and asserts the invariants that hold during the whole story."""
    story.begin(service)
    engines = service.world.engines_of(*service.key)
    with service.traffic() as traffic:
        relay.kill_at_steps(kills)
        story.change(service)
        while not _is_over(service, story):
            service.wait_until(lambda: relay.is_cut or _is_over(service, story), "a step or the end")
            if relay.is_cut:
                assert relay.num_kills < _MAX_KILLS, relay.story()
                relay.hand_over()
        relay.kill_at_steps(False)
        if relay.is_cut:
            relay.hand_over()
    service.wait("Available", "Serving")
    # The reconcile after the last change of the status releases the PodDisruptionBudgets of deleted pods.
    service.wait_until(lambda: service.num_held == len(service.pods), "a budget of the pods that are left")
    assert service.most == 2
    assert traffic.fewest == 1
    assert traffic.failures == []
    assert all(engine.found_at_drain == () for engine in engines.values())


def _is_over(service: Service, story: Story) -> bool:
    progressing = service.condition("Progressing")
    return progressing.get("reason") == story.end and len(service.clusters) == 1
