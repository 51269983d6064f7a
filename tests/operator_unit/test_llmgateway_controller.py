"""LLMGateways in the controller, whose cluster is a dictionary: events, writes, the models file, crashes, no CRD."""

import asyncio
import copy

import pytest

from rayloom_operator.kube.client import NOT_FOUND, KubeError, KubeUnreachable
from rt_fake_kube import FakeKube
from rt_llmgateway import make_gateway_document, make_service_document, with_gateways

ALIAS = {"name": "assistant", "targets": [{"service": "chat", "weight": 90}, {"service": "chat-next", "weight": 10}]}
CHAT = make_service_document()
NEXT = make_service_document("chat-next", created="2026-01-02T00:00:00Z")
DEPLOYMENT = ("apply", "/apis/apps/v1/namespaces/team/deployments/public-llmgateway")
KINDS = ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Secret", "Service", "ServiceAccount"]


def put(**spec):
    return lambda world: world.kube.put(make_gateway_document(**spec))


def objects(kube):
    """The objects that the LLMGateway owns, without the fields that the API server sets."""
    found = {}
    for path, each in kube.objects.items():
        if each["metadata"].get("labels", {}).get("rayloom.dev/llmgateway") and each["kind"] != "Pod":
            meta = {name: each["metadata"][name] for name in ("name", "labels", "ownerReferences")}
            found[path] = each | {"metadata": meta}
    return found


async def serves(world, models=("chat",)):
    await world.until(lambda: sorted(world.models_file.get("models", {})) == sorted(models))
    await world.rest()


def test_one_url_is_made_for_the_selected_services():
    async def story(world):
        await serves(world, ["chat", "chat-next"])
        assert sorted(each["kind"] for each in objects(world.kube).values()) == KINDS
        for each in objects(world.kube).values():
            (owner,) = each["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMGateway", "uid-public", True)
        world.show_pods(2)
        await world.until(lambda: world.condition("Available").get("status") == "True")
        await world.rest()
        assert world.status["endpoint"] == "http://public-llmgateway.team.svc:8000"
        assert (world.status["ready"], world.status["serving"]) == ("2/2", "2/2")
        conditions = {each["type"]: (each["status"], each["reason"]) for each in world.status["conditions"]}
        assert conditions == {
            "Accepted": ("True", "Valid"),
            "Available": ("True", "Serving"),
            "Degraded": ("False", "Healthy"),
            "Progressing": ("False", "Complete"),
        }
        assert world.status["aliases"] == [
            {"name": "assistant", "state": "Serving", "reason": "Serving", "message": ""}
        ]
        assert "Serving" in [each["reason"] for each in world.kube.objects.values() if each["kind"] == "Event"]

    with_gateways(story, prepare=put(aliases=[ALIAS]), services=[CHAT, NEXT])


def test_services_that_come_and_go_change_the_models_file_and_no_pod():
    async def story(world):
        await serves(world)
        world.kube.calls.clear()
        world.set_service(NEXT)
        await serves(world, ["chat", "chat-next"])
        world.set_service(CHAT | {"metadata": CHAT["metadata"] | {"labels": {}}})
        await serves(world, ["chat-next"])
        world.remove_service("chat-next")
        await serves(world, [])
        assert DEPLOYMENT not in world.kube.calls
        await world.until(lambda: world.condition("Available").get("reason") == "NoModels")

    with_gateways(story, prepare=put(), services=[CHAT])


def test_a_changed_weight_replaces_no_pod_and_a_new_secret_of_keys_does():
    async def story(world):
        await serves(world, ["chat", "chat-next"])
        world.kube.calls.clear()
        even = copy.deepcopy(ALIAS)
        even["targets"][0]["weight"] = 10
        world.kube.put(make_gateway_document(aliases=[even]))
        weights = [{"model": "chat", "weight": 10}, {"model": "chat-next", "weight": 10}]
        await world.until(lambda: world.models_file["aliases"]["assistant"]["targets"] == weights)
        await world.rest()
        assert DEPLOYMENT not in world.kube.calls
        world.set_service(make_service_document(auth={"apiKeySecretRef": {"name": "keys", "key": "all"}}))
        await world.until(lambda: DEPLOYMENT in world.kube.calls)

    with_gateways(story, prepare=put(aliases=[ALIAS]), services=[CHAT, NEXT])


def test_a_service_that_stops_to_serve_is_shown_and_the_gateway_follows():
    async def story(world):
        await serves(world)
        world.show_pods(2)
        await world.until(lambda: world.condition("Available").get("status") == "True")
        world.set_service(make_service_document(available="TokensStopped"))
        await world.until(lambda: world.condition("Available").get("status") == "False")
        assert world.condition("Available")["reason"] == "TokensStopped"
        assert world.status["models"][0]["state"] == "Waiting"
        assert world.models_file["models"].keys() == {"chat"}

    with_gateways(story, prepare=put(), services=[CHAT])


def test_nothing_is_written_while_a_part_of_the_services_is_unknown():
    def prepare(world):
        world.are_known = False
        put()(world)

    async def story(world):
        await world.until(lambda: world.controller._queue._timers)
        await world.rest()
        assert world.kube.calls == []
        world.are_known = True
        world.set_service(NEXT)
        await serves(world, ["chat", "chat-next"])

    with_gateways(story, prepare=prepare, services=[CHAT])


def test_an_edited_object_is_restored():
    async def story(world):
        await serves(world)
        path = world.kube.path("NetworkPolicy")
        found = world.kube.objects[path]
        world.kube.put(found | {"spec": found["spec"] | {"ingress": [{}]}})
        await world.until(lambda: world.kube.objects[path]["spec"] == found["spec"])
        world.kube.remove(world.kube.path("Service"))
        await world.until(lambda: world.kube.named("Service") == ["public-llmgateway"])

    with_gateways(story, prepare=put(), services=[CHAT])


def test_a_spec_that_cannot_be_read_leaves_everything_and_says_why():
    async def story(world):
        await serves(world)
        before = objects(world.kube)
        world.kube.put(make_gateway_document(replicas=17) | {"status": world.status})
        await world.until(lambda: world.condition("Accepted").get("reason") == "InvalidSpec")
        await world.rest()
        assert "17 is not allowed: use 0 to 16 gateway pods" in world.condition("Accepted")["message"]
        assert (world.condition("Progressing")["status"], world.condition("Progressing")["reason"]) == (
            "False",
            "InvalidSpec",
        )
        assert world.status["models"][0]["name"] == "chat"
        assert objects(world.kube) == before

    with_gateways(story, prepare=put(), services=[CHAT])


def test_a_deleted_gateway_is_forgotten_and_a_new_one_of_its_name_is_served():
    async def story(world):
        await serves(world)
        world.kube.remove(world.kube.path("LLMGateway"))
        for path in objects(world.kube):  # like the garbage collector
            world.kube.remove(path)
        await world.rest()
        calls = list(world.kube.calls)
        world.set_service(NEXT)
        await world.rest()
        assert world.kube.calls == calls
        again = make_gateway_document()
        again["metadata"]["uid"] = "uid-2"
        world.kube.put(again)
        await serves(world, ["chat", "chat-next"])

    with_gateways(story, prepare=put(), services=[CHAT])


def test_without_the_kind_the_operator_asks_for_it_and_does_nothing_else(monkeypatch):
    monkeypatch.setattr("rayloom_operator.kube.reflector._UNKNOWN_DELAY_S", 0.01)
    kube = FakeKube()
    kube.refusals = {("list", "/llmgateways"): KubeError(NOT_FOUND, "the server could not find the requested resource")}

    async def story(world):
        await world.until(lambda: kube.lists.count("/apis/rayloom.dev/v1alpha1/llmgateways") >= 3)
        assert set(kube.lists) == {"/apis/rayloom.dev/v1alpha1/llmgateways"}
        assert world.controller.problem() == ""
        world.set_service(NEXT)
        # The CRD is installed.
        kube.refusals.clear()
        put()(world)
        await serves(world, ["chat", "chat-next"])

    with_gateways(story, kube=kube, services=[CHAT])


class Killed(BaseException):
    """The operator's process ends here."""


class Interrupted(FakeKube):
    """A cluster in which the write with the number `at` fails, before or after the API server has executed it."""

    def __init__(self, at, error, is_done):
        super().__init__()
        self.at, self.error, self.is_done = at, error, is_done
        self.num_writes = 0

    async def _once(self, step):
        number, self.num_writes = self.num_writes, self.num_writes + 1
        if number != self.at:
            return await step()
        if self.is_done:
            await step()
        raise self.error

    async def create(self, manifest):
        return await self._once(lambda: super(Interrupted, self).create(manifest))

    async def replace(self, manifest):
        return await self._once(lambda: super(Interrupted, self).replace(manifest))

    async def apply(self, manifest, *, force=True):
        return await self._once(lambda: super(Interrupted, self).apply(manifest, force=force))

    async def replace_status(self, manifest):
        return await self._once(lambda: super(Interrupted, self).replace_status(manifest))


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KubeError(500, "etcd leader changed"), KubeUnreachable("none"), Killed()], ids=type)
@pytest.mark.parametrize("at", range(8))
def test_a_restart_at_any_write_converges(at, error, is_done):
    async def end(world):
        await serves(world)
        await world.until(lambda: world.condition("Progressing").get("reason") == "Starting")

    calm = FakeKube()
    with_gateways(end, prepare=put(), kube=calm, services=[CHAT])
    kube = Interrupted(at, error, is_done)

    async def story(world):
        if isinstance(error, Killed):
            await world.until(lambda: kube.num_writes > at)
        else:
            await end(world)

    try:
        with_gateways(story, prepare=put(), kube=kube, services=[CHAT])
    except BaseExceptionGroup as group:
        assert isinstance(error, Killed) and group.subgroup(Killed)
    with_gateways(end, kube=kube, services=[CHAT])
    assert kube.num_writes > at
    assert objects(kube) == objects(calm)


def test_a_restarted_operator_writes_nothing_and_replaces_the_secret_after_a_change():
    kube = FakeKube()

    async def settle(world):
        await serves(world)
        await world.until(lambda: world.condition("Progressing"))
        await world.rest()

    with_gateways(settle, prepare=put(), kube=kube, services=[CHAT])
    kube.calls.clear()

    async def again(world):
        await world.until(lambda: world.controller.serving(("team", "chat")))
        await world.rest()
        assert kube.calls == []

    with_gateways(again, kube=kube, services=[CHAT])

    async def with_another_service(world):
        await serves(world, ["chat", "chat-next"])
        found = [(verb, path.split("/")[-2]) for verb, path in kube.calls[:3]]
        # The first apply removes the digest of the former Secret.
        assert found == [("apply", "serviceaccounts"), ("update", "secrets"), ("apply", "serviceaccounts")]

    with_gateways(with_another_service, kube=kube, services=[CHAT, NEXT])


def test_service_events_are_collected():
    async def story(world):
        await serves(world)
        world.kube.calls.clear()
        for number in range(20):
            world.set_service(make_service_document(f"s{number}"))
        await serves(world, ["chat", *(f"s{number}" for number in range(20))])
        assert [verb for verb, path in world.kube.calls if "/secrets/" in path] == ["update"]

    with_gateways(story, prepare=put(), services=[CHAT])


class Held(FakeKube):
    """A cluster that replaces a Secret only while `may_replace` is set."""

    def __init__(self):
        super().__init__()
        self.may_replace = asyncio.Event()
        self.may_replace.set()
        self.is_held = False

    async def replace(self, manifest):
        self.is_held = not self.may_replace.is_set()
        await self.may_replace.wait()
        return await super().replace(manifest)


def limited(name, created, tokens):
    return make_service_document(name, created=created, engine={"args": {"maxOutputTokens": tokens}})


def test_a_service_event_during_a_reconcile_is_not_lost_with_the_timer_of_the_event_before_it():
    async def story(world):
        await serves(world, ["chat", "chat-next"])
        world.show_pods(1)
        await world.until(lambda: world.status.get("readyReplicas") == 1)
        await world.rest()
        world.kube.may_replace.clear()
        # These changes must not be visible in the status, because a write of the status would be another event.
        world.set_service(limited("chat", "2026-01-01T00:00:00Z", 100))
        world.kube.put(world.kube.objects[world.kube.path("Pod")])
        await world.until(lambda: world.kube.is_held)
        world.set_service(limited("chat-next", "2026-01-02T00:00:00Z", 200))
        world.kube.may_replace.set()
        await world.until(lambda: world.models_file["models"]["chat-next"]["settings"])
        assert [each["settings"] for each in world.models_file["models"].values()] == [
            {"max_output_tokens": 100},
            {"max_output_tokens": 200},
        ]

    with_gateways(story, prepare=put(), kube=Held(), services=[CHAT, NEXT])
