"""If an operator is killed at any write, the next operator reaches the same end state.

Each write is a step. The operator is killed after the API server has carried out the write, and before the operator has
the answer. A kill just before a write leaves the same state as a kill just after the previous write. Rollouts are in
test_rollout_restarts.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from api.end_state import wait_same_end
from api.namespaces import llm_service
from operator_processes.process import OPERATOR, OperatorProcess, wait_until
from operator_processes.proxy import Request
from real_api_server.world import LLM, World

# Upper bound of the writes of a story. A story needs about 20.
_MAX_WRITES = 60
# Seconds between two checks of all objects of a service. A check takes ten requests.
_PAUSE_S = 0.2


Act = Callable[[World, str, str], None]
_MODEL = {"source": "builtin://smollm2-135m", "servedName": "chat"}  # `servedName` keeps the name out of the revision


def _create(world: World, namespace: str, name: str) -> None:
    world.create(llm_service(namespace, name, model=_MODEL))


def _recreate(world: World, namespace: str, name: str) -> None:
    uid = world.services[(namespace, name)]["metadata"]["uid"]
    world.delete(f"{LLM}/namespaces/{namespace}/llmservices/{name}")
    wait_until(
        lambda: world.services.get((namespace, name), {}).get("metadata", {}).get("uid") != uid, "the old one's end"
    )
    _create(world, namespace, name)


STORIES: dict[str, tuple[Act, ...]] = {
    "a new service": (_create,),
    "a recreated service": (_create, _recreate),
}


@pytest.fixture
def alone(world: World) -> Iterator[None]:
    """Lets no operator run except those that the test starts."""
    world.stop_operators()
    yield
    world.stop_operators()


@pytest.mark.parametrize("story", STORIES)
def test_killed_after_any_write_the_end_is_the_same(story: str, world: World, alone: None, namespace: str) -> None:
    *before, last = STORIES[story]
    # The operators are started by a command. Forked operators would share the hash seed, and so the order of sets.
    current, successor = world.start_operator(command=OPERATOR), world.start_operator(is_held=True)
    assert _play(world, namespace, "chat-0", before, last, current, 0)
    num_kills = 0
    for number in range(1, _MAX_WRITES):
        assert current.is_alive
        if not _play(world, namespace, f"chat-{number}", before, last, current, number, successor):
            break
        num_kills += 1
        wait_same_end(world, namespace, f"chat-{number}", "chat-0")
        world.delete(f"{LLM}/namespaces/{namespace}/llmservices/chat-{number}")
        current, successor = successor, world.start_operator(is_held=True)
    assert 4 < num_kills < _MAX_WRITES - 1, "each write was a step boundary, and there is a last one"


def _play(
    world: World,
    namespace: str,
    name: str,
    before: list[Act],
    last: Act,
    operator: OperatorProcess,
    kill_at: int,
    successor: OperatorProcess | None = None,
) -> bool:
    """Returns when the service is complete. The result is False if the last act needed fewer writes than `kill_at`."""
    for act in before:
        act(world, namespace, name)
        world.wait_serving(namespace, name)
    writes: list[Request] = []

    def after_write(request: Request) -> None:
        is_status = request.path.split("?")[0].endswith("/status")
        # The status is computed from the other objects. So of consecutive status writes, only the first is a step.
        names = re.findall(r"/(chat-\d+)", request.path) or [name]
        is_own = f"/namespaces/{namespace}/" in request.path and names == [name]
        if is_own and not (is_status and writes and "/status" in writes[-1].path):
            writes.append(request)
            if len(writes) == kill_at:
                print(f"{name}: killed after {request.method} {request.path}")
                operator.process.kill()

    operator.proxy.after_write = after_write
    last(world, namespace, name)
    if successor is not None:
        wait_until(
            lambda: len(writes) >= kill_at or (_knows(world, namespace, name) and _has_served(world, namespace, name)),
            f"write {kill_at} or the end",
            story=operator.story,
            pause_s=_PAUSE_S,
        )
        if len(writes) < kill_at:
            assert operator.is_alive
            return False
        operator.kill()  # waits for the end of its process
        world.take_lease()
        world.release(successor.proxy)
    _wait_whole(world, namespace, name)
    return True


def _knows(world: World, namespace: str, name: str) -> bool:
    """True once the watch has delivered the service of the last act."""
    meta = world.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/{name}")["metadata"]
    known = world.services.get((namespace, name), {}).get("metadata", {})
    return (known.get("uid"), known.get("generation")) == (meta["uid"], meta["generation"])


def _has_served(world: World, namespace: str, name: str) -> bool:
    """True once all objects of this spec are written and the service is Available."""
    service = world.services.get((namespace, name), {})
    available = world.condition(namespace, name, "Available")
    return available.get("status") == "True" and (
        available["observedGeneration"] == service["metadata"]["generation"] and _is_whole(world, namespace, name)
    )


def _is_whole(world: World, namespace: str, name: str) -> bool:
    objects = world.objects(namespace, name)
    uid = world.services[(namespace, name)]["metadata"]["uid"]
    owners = {owner["uid"] for each in objects.values() for owner in each["metadata"]["ownerReferences"]}
    clusters = [each for each in objects if each.startswith("RayCluster/")]
    status = world.services[(namespace, name)].get("status", {})
    held = [each["spec"]["minAvailable"] for key, each in objects.items() if key.startswith("PodDisruptionBudget/")]
    # A replica of an earlier revision may make the service Available until it ends. So no such replica may be left.
    groups = [(f"RayCluster/{each['name']}", each["state"]) for each in status.get("groups", ())]
    return (
        len(clusters) == 1
        and status.get("currentRevision", "none") in clusters[0]
        and groups == [(clusters[0], "Serving")]
        and not any("deletionTimestamp" in each["metadata"] for each in objects.values())
        # The RayCluster owns KubeRay's objects.
        and owners <= {uid, *(objects[each]["metadata"]["uid"] for each in clusters)}
        and held == [len(world.pods(namespace, name))] == [2]
    )


def _wait_whole(world: World, namespace: str, name: str) -> None:
    world.wait_serving(namespace, name)
    wait_until(
        lambda: _has_served(world, namespace, name),
        "one RayCluster of the last revision, and nothing of another",
        story=lambda: f"{sorted(world.objects(namespace, name))}\n{world.story()}",
        pause_s=_PAUSE_S,
    )
