"""Rollouts by a running controller: endpoints, the drain of an engine, and the ControllerRevisions."""

import asyncio

import pytest

from rayloom_operator.decide.rollout import planner, terminating
from rayloom_operator.engines import request as status_request
from rayloom_operator.errors import EngineUnavailable
from rt_operator import make_pod_document
from rt_world import SERVICE, service, with_world


class Engines:
    """The engines' answers, by address."""

    def __init__(self):
        self.asked = []
        self.draining = set()
        self.on_drain = lambda: None
        self.are_silent = False
        self.num_sequences = 0  # number of gateways' sequences in each engine
        self.num_answers_in_drain = 0

    async def ask(self, ip, port, token, method="GET", path="/status", body=b""):
        if path == "/drain":
            self.asked.append((method, ip))
            self.on_drain()
            (self.draining.add if method == "POST" else self.draining.discard)(ip)
            return 200, b"{}"
        if self.are_silent:
            raise EngineUnavailable("no answer within 3 s")
        state = "draining" if ip in self.draining else "serving"
        self.num_answers_in_drain += state == "draining"
        said = (
            f'{{"version": "v1", "state": "{state}", "reason": "", "startup": [], "model": null, "ranks": [], '
            '"last_token_age_seconds": 1.0, "requests": {"in_flight": 0, "finished": 9, "failed": 0, '
            f'"running": {self.num_sequences}, '
            '"first_token_seconds": {"1": 9, "+Inf": 9}}}'
        )
        return 200, said.encode()


@pytest.fixture
def engines(monkeypatch):
    found = Engines()
    monkeypatch.setattr(status_request, "ask", found.ask)
    # UNLISTED_S is the time from the end of an engine's endpoint to the engine's drain. test_rollout.py tests the real
    # value with a simulated clock.
    for module in (planner, terminating):
        monkeypatch.setattr(module, "UNLISTED_S", 0.1)
    monkeypatch.setattr(planner, "_REQUEUE_S", 0.1)
    return found


def run_pods(world):
    """Gives each RayCluster its two pods, both ready."""
    kube = world.kube
    clusters = [each for each in kube.objects.values() if each["kind"] == "RayCluster"]
    for cluster in clusters:
        name, uid = cluster["metadata"]["name"], cluster["metadata"]["uid"]
        ip = f"10.0.{sum(map(ord, name)) % 200}.{1 + int(name[-1])}"
        for kind in ("head", "worker"):
            node = "n1" if kind == "head" else "n2"
            document = make_pod_document(f"{name}-{kind}", is_head=kind == "head", owner=uid, node=node)
            path = f"/api/v1/namespaces/team/pods/{name}-{kind}"
            known = kube.objects.get(path)
            document["metadata"]["labels"] |= {"rayloom.dev/service": "chat", "rayloom.dev/group": name}
            document["status"]["podIP"] = ip if kind == "head" else ""
            if known is None:
                kube.put({"apiVersion": "v1", "kind": "Pod", **document})
    names = {each["metadata"]["name"] for each in clusters}
    for path, each in list(kube.objects.items()):
        if each["kind"] == "Pod" and each["metadata"]["name"].rpartition("-")[0] not in names:
            kube.remove(path)


async def settle(world, condition):
    async with asyncio.timeout(30):
        while not condition():
            run_pods(world)
            await asyncio.sleep(0.01)


@pytest.fixture
def patched(monkeypatch):
    """Replaces FakeKube's patch, which does not store labels, by a patch that stores them."""

    async def patch(self, path, body):
        self._note("patch", path)
        known = self.objects.get(path)
        if known is None:
            return {}
        if known["kind"] == "Lease":
            return self.put(known | {"spec": body["spec"]})
        labels = known["metadata"]["labels"] | body["metadata"].get("labels", {})
        meta = known["metadata"] | {"labels": {name: text for name, text in labels.items() if text is not None}}
        return self.put(known | {"metadata": meta})

    monkeypatch.setattr("rt_fake_kube.FakeKube.patch", patch)


def test_a_rollout_from_the_first_engine_to_the_last_object_of_the_old_one(engines, patched):
    quick = {"analysis": {"holdSeconds": 0, "minRequests": 1}}

    def progress(world):
        return world.kube.statuses[-1].get("progress") if world.kube.statuses else None

    async def story(world):
        world.ask_for(service(rollout=quick))
        await settle(world, lambda: progress(world) == "Complete")
        (old,) = world.kube.named("RayCluster")
        before = world.kube.statuses[-1]
        assert world.kube.named("ControllerRevision") == [f"chat-{before['currentRevision']}"]
        changed = service(rollout=quick, engine={"args": {"threads": 2}})
        changed["metadata"]["generation"] = 2
        world.ask_for(changed | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: len(world.kube.named("RayCluster")) == 2)
        assert world.kube.statuses[-1]["currentRevision"] == before["currentRevision"]
        await settle(world, lambda: progress(world) == "Complete" and old not in world.kube.named("RayCluster"))
        await world.rest()
        after = world.kube.statuses[-1]
        assert [method for method, _ in engines.asked][:1] == ["POST"]
        assert after["currentRevision"] == after["updateRevision"] != before["currentRevision"]
        assert world.kube.named("ControllerRevision") == [f"chat-{after['currentRevision']}"]
        assert [name for name in world.kube.named("ConfigMap") if name == old] == []
        # First the route is removed, then the engine drains, then it is deleted.
        calls = [path for verb, path in world.kube.calls if old in path and verb in ("patch", "delete")]
        kinds = dict.fromkeys(path.split("/")[-2] for path in calls)
        assert list(kinds) == ["pods", "secrets", "configmaps", "rayclusters"]

    with_world(story)


def test_an_engine_serves_once_clients_find_it_and_not_by_its_label_alone(engines, patched):
    async def story(world):
        world.kube.lists_endpoints = False
        world.ask_for(service())

        def heads():
            pods = [each for each in world.kube.objects.values() if each["kind"] == "Pod"]
            return [each for each in pods if each["metadata"]["labels"].get("rayloom.dev/route") == "true"]

        await settle(world, heads)
        await world.rest()
        said = world.kube.statuses[-1]
        assert (world.reason(), said["ready"], said["progress"]) == ("Starting", "0/1", "Scaling")
        assert "once clients find pod" in world.message("Available")
        world.kube.lists_endpoints = True
        world.kube.put(heads()[0])
        await world.until(lambda: world.reason() == "Serving")
        said = world.kube.statuses[-1]
        assert (said["ready"], said["progress"]) == ("1/1", "Complete")

    with_world(story)


def test_no_engine_drains_while_clients_find_it_although_the_watch_has_lost_its_endpoint(engines, patched):
    async def story(world):
        old = await serve(world)
        head = f"/api/v1/namespaces/team/pods/{old}-head"
        world.kube.lists_endpoints = False
        (path, found) = next((at, each) for at, each in world.kube.objects.items() if each["kind"] == "EndpointSlice")
        world.kube._tell("DELETED", path, found)  # the EndpointSlice still exists
        none = service(replicas=0)
        none["metadata"]["generation"] = 2
        world.kube.lists.clear()
        world.ask_for(none | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: any(each.endswith("/endpointslices") for each in world.kube.lists))
        await world.rest()
        assert (engines.asked, world.kube.named("RayCluster")) == ([], [old])
        world.kube.lists_endpoints = True
        world.kube.put(world.kube.objects[head])
        await settle(world, lambda: world.kube.named("RayCluster") == [])
        assert engines.asked[0][0] == "POST"

    with_world(story)


def test_a_draining_engine_gets_a_route_only_once_it_answers_that_it_serves(engines, patched):
    async def story(world):
        old = await serve(world)
        head = f"/api/v1/namespaces/team/pods/{old}-head"

        def is_routed():
            return world.kube.objects[head]["metadata"]["labels"].get("rayloom.dev/route") == "true"

        def change_back():
            assert not is_routed()
            engines.on_drain, engines.are_silent = lambda: None, True
            again = service()
            again["metadata"]["generation"] = 3
            world.ask_for(again | {"status": world.kube.objects[SERVICE]["status"]})

        engines.on_drain = change_back
        none = service(replicas=0)
        none["metadata"]["generation"] = 2
        world.ask_for(none | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: ("DELETE", engines.asked[0][1]) in engines.asked if engines.asked else False)
        await world.rest()
        assert not is_routed(), "every answer of the engine is from before it was asked"
        assert world.kube.named("RayCluster") == [old]
        engines.are_silent = False
        await settle(world, lambda: world.reason() == "Serving" and is_routed())
        assert world.kube.named("RayCluster") == [old]

    with_world(story)


def test_a_service_is_suspended_and_resumes(engines, patched):
    async def story(world):
        world.ask_for(service())
        await settle(world, lambda: world.reason() == "Serving")
        none = service(replicas=0)
        none["metadata"]["generation"] = 2
        world.ask_for(none | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: world.reason() == "Suspended")
        assert world.kube.named("RayCluster") == []
        again = service()
        again["metadata"]["generation"] = 3
        world.ask_for(again | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: world.reason() == "Serving")

    with_world(story)


def test_the_last_engine_is_deleted_once_its_sequences_of_gateways_have_ended(engines, patched):
    async def story(world):
        old = await serve(world)
        engines.num_sequences = 1
        none = service(replicas=0)
        none["metadata"]["generation"] = 2
        world.ask_for(none | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: engines.num_answers_in_drain >= 2)
        await world.rest()
        assert world.kube.named("RayCluster") == [old]
        engines.num_sequences = 0
        await settle(world, lambda: world.kube.named("RayCluster") == [])

    with_world(story)


def budget(world):
    (found,) = [each for each in world.kube.objects.values() if each["kind"] == "PodDisruptionBudget"]
    return found["spec"]["minAvailable"]


async def serve(world):
    world.ask_for(service())
    await settle(world, lambda: world.reason() == "Serving" and world.reason("Progressing") == "Complete")
    (old,) = world.kube.named("RayCluster")
    assert budget(world) == 2  # a head and a worker
    return old


def cordon(world, name, is_cordoned=True):
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "namespace": ""}}
    world.kube.put(node | {"spec": {"unschedulable": True} if is_cordoned else {}, "status": {}})


@pytest.mark.parametrize("node", ["n1", "n2"])  # nodes of the head and of the worker
def test_an_engine_on_a_cordoned_node_is_moved(engines, patched, node):
    async def story(world):
        old = await serve(world)
        cordon(world, node)
        await settle(world, lambda: world.reason("Progressing") == "Moving" and budget(world) == 4)
        # The cluster has only two nodes, so the pods of the new engine are on the nodes of the first engine. The
        # operator deletes neither of these engines. Once the cordon has ended, there is one engine too many.
        await settle(world, lambda: len(world.kube.named("RayCluster")) == 2)
        cordon(world, node, False)
        await settle(world, lambda: world.reason("Progressing") == "Complete" and budget(world) == 2)
        assert old in world.kube.named("RayCluster")

    with_world(story)


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_the_eviction_of_a_pod_that_tolerates_a_cordon_is_not_held(engines, patched, toleration, stays):
    async def story(world):
        old = await serve(world)
        path = f"/api/v1/namespaces/team/pods/{old}-worker"
        worker = world.kube.objects[path]
        world.kube.put(worker | {"spec": worker["spec"] | {"tolerations": [toleration]}})
        cordon(world, "n2")
        if stays:
            await settle(world, lambda: budget(world) == 0)
            assert (world.reason("Progressing"), world.kube.named("RayCluster")) == ("Complete", [old])
        else:
            await settle(world, lambda: world.reason("Progressing") == "Moving" and budget(world) == 4)

    with_world(story)


def test_evictions_are_allowed_while_the_spec_cannot_be_read(engines, patched):
    async def story(world):
        old = await serve(world)
        bad = service(model={"source": 7})
        bad["metadata"]["generation"] = 2
        world.ask_for(bad | {"status": world.kube.objects[SERVICE]["status"]})
        await settle(world, lambda: world.reason("Accepted") == "InvalidSpec" and budget(world) == 0)
        assert world.kube.named("RayCluster") == [old]

    with_world(story)


def test_a_service_that_the_release_before_has_stored_rolls_nothing_and_gets_the_new_names(engines, patched):
    async def story(world):
        old = await serve(world)
        status = world.kube.objects[SERVICE]["status"]
        known = status["rollout"]
        former = {
            "currentRevision": known["currentRevision"],
            "updateRevision": known["updateRevision"],
            "hasServed": known["currentRevisionServed"],
            "isPromoted": False,
            "counts": known["enginesPerRevision"],
            "leaving": {},
            "rollTime": "",
            "step": known["step"],
            "stepTime": known["stepStartTime"],
            "progressTime": "",
            "mostWell": 0,
            "heldTime": "",
            "shortTime": "",
        }
        num_statuses = len(world.kube.statuses)
        world.kube.calls.clear()
        world.ask_for(service() | {"status": status | {"rollout": former}})
        await settle(world, lambda: len(world.kube.statuses) > num_statuses)
        await world.rest()
        assert world.kube.statuses[-1]["rollout"] == known
        assert world.kube.named("RayCluster") == [old]
        assert [path for verb, path in world.kube.calls if verb == "delete"] == []
        assert engines.asked == []

    with_world(story)
