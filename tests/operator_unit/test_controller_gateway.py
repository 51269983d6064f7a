"""A gateway in the controller, whose cluster is a dictionary: created, restored, kept in a restart, removed."""

import asyncio
from dataclasses import replace

import pytest

from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.names import path_of
from rayloom_operator.objects.gateway.companions import gateway_secret
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.secret_digest import SECRETS_ANNOTATION
from rayloom_operator.observe.drift import Drift
from rayloom_operator.reconcile.apply.applier import Applier
from rt_fake_kube import FakeKube
from rt_operator import SETTINGS, make_pod_document, make_resolved, make_service
from rt_world import SERVICE, service, with_world

DEPLOYMENT = "/apis/apps/v1/namespaces/team/deployments/chat-gateway"
OF_GATEWAYS = {
    ("Deployment", "chat-gateway"),
    ("PodDisruptionBudget", "chat-gateway"),
    ("Service", "chat-gateway"),
    ("Service", "chat-engines"),
    ("Secret", gateway_secret(make_service(), b"k")["metadata"]["name"]),
}


def objects(kube):
    return {(each["kind"], each["metadata"]["name"]) for each in kube.objects.values()} & OF_GATEWAYS


def later(kube, generation, **spec):
    """The service after a change of its spec, with the last written status."""
    document = service(**spec) | {"status": kube.statuses[-1]}
    document["metadata"] |= {"generation": generation}
    return document


def gateway_pod():
    document = make_pod_document("chat-gateway-a", is_head=False)
    document["metadata"]["labels"] = {"rayloom.dev/gateway": "chat", "rayloom.dev/service": "chat"}
    return {"apiVersion": "v1", "kind": "Pod", **document}


def test_a_gateway_is_created_counted_and_removed():
    async def story(world):
        kube = world.kube
        world.ask_for(service(gateway={}))
        await world.until(lambda: objects(kube) == OF_GATEWAYS)
        kube.put(gateway_pod())
        await world.until(lambda: kube.statuses[-1]["gateway"]["ready"] == 1)
        await world.rest()
        assert kube.statuses[-1]["endpoint"] == "http://chat-gateway.team.svc:8000"
        world.ask_for(later(kube, 2, gateway={"replicas": 0}))
        await world.until(lambda: not kube.named("Deployment"))
        await world.until(lambda: kube.statuses[-1]["gateway"]["reason"] == "Off")
        assert kube.statuses[-1]["endpoint"] == "http://chat.team.svc:8000"
        await world.rest()
        world.ask_for(later(kube, 3, replicas=0))
        await world.until(lambda: not objects(kube))
        await world.until(lambda: "gateway" not in kube.statuses[-1])

    with_world(story)


def test_a_deployment_scaled_by_hand_is_as_before():
    async def story(world):
        kube = world.kube
        world.ask_for(service(gateway={"replicas": 3}))
        await world.until(lambda: DEPLOYMENT in kube.objects)
        await world.rest()
        found = kube.objects[DEPLOYMENT]
        kube.put(found | {"spec": found["spec"] | {"replicas": 9}})
        await world.until(lambda: kube.objects[DEPLOYMENT]["spec"]["replicas"] == 3)
        kube.remove(DEPLOYMENT)
        await world.until(lambda: DEPLOYMENT in kube.objects)

    with_world(story)


def test_a_restarted_operator_writes_nothing_and_removes_what_its_predecessor_made():
    kube = FakeKube()

    async def before(world):
        world.ask_for(service(gateway={}))
        await world.until(lambda: objects(kube) == OF_GATEWAYS)
        await world.rest()

    with_world(before, kube=kube)
    kube.calls.clear()

    async def after(world):
        world.ask_for(kube.objects[SERVICE])
        await world.rest()
        assert kube.calls == []
        world.ask_for(later(kube, 2, replicas=0))
        await world.until(lambda: not objects(kube))

    with_world(after, kube=kube)


ENGINES = "/api/v1/namespaces/team/services/chat-engines"


async def create(world):
    world.ask_for(service(gateway={}))
    await world.until(lambda: world.kube.named("RayCluster"))
    await world.rest()


async def restart(world):
    world.kube.calls.clear()
    world.ask_for(world.kube.objects[SERVICE])
    await world.rest()


def written_secrets(kube):
    return [path for _, path in kube.calls if path.endswith("/secrets") or "/secrets/" in path]


@pytest.mark.parametrize(("pod_tls", "num_secrets"), [("off", 1), ("strict", 3)])
def test_a_restarted_operator_writes_secrets_only_if_a_service_does_not_show_that_they_were_written(
    pod_tls, num_secrets
):
    kube, settings = FakeKube(), replace(SETTINGS, pod_tls=pod_tls)
    with_world(create, kube=kube, settings=settings)
    with_world(restart, kube=kube, settings=settings)
    assert kube.calls == []
    # The predecessor was killed before it wrote the Service.
    kube.remove(ENGINES)
    with_world(restart, kube=kube, settings=settings)
    assert len(written_secrets(kube)) == num_secrets
    assert [path for _, path in kube.calls][-1] == ENGINES
    # Another key gives other Secrets.
    with_world(restart, kube=kube, settings=replace(settings, operator_key=b"k" * 16))
    assert len(written_secrets(kube)) == num_secrets


def remove_digest(kube):
    """As `kubectl annotate service chat-engines rayloom.dev/secrets-` does."""
    found = kube.objects[ENGINES]
    annotations = {name: text for name, text in found["metadata"]["annotations"].items() if name != SECRETS_ANNOTATION}
    kube.put(found | {"metadata": found["metadata"] | {"annotations": annotations}})


@pytest.mark.parametrize("is_away", [False, True], ids=["while the operator runs", "before it starts"])
def test_a_user_who_removes_the_digest_gets_deleted_secrets_back(is_away):
    kube, settings = FakeKube(), replace(SETTINGS, pod_tls="strict")
    with_world(create, kube=kube, settings=settings)
    before = {path: each["data"] for path, each in kube.objects.items() if each["kind"] == "Secret"}
    shared = [path for path in before if not path.endswith("-admin")]

    def delete():
        for path in shared:
            kube.remove(path)
        remove_digest(kube)

    async def story(world):
        await restart(world)
        if not is_away:
            delete()
        await world.until(lambda: all(path in kube.objects for path in shared))
        await world.until(lambda: kube.objects[ENGINES]["metadata"]["annotations"].get(SECRETS_ANNOTATION))
        assert {path: kube.objects[path]["data"] for path in before} == before

    if is_away:
        delete()
    with_world(story, kube=kube, settings=settings)


def test_a_secret_that_was_deleted_while_no_operator_ran_comes_back_once_a_pod_waits_for_it(monkeypatch):
    for name in ("_MOUNT_CHECK_S", "LATE_MOUNT_CHECK_S"):
        monkeypatch.setattr(f"rayloom_operator.decide.requeue.{name}", 0.05)
    monkeypatch.setattr("rayloom_operator.reconcile.apply.objects._LEAST_S", 0.05)
    kube = FakeKube()
    with_world(create, kube=kube)
    (secret,) = [path for path in kube.objects if "/secrets/chat-gateway-" in path]
    kube.remove(secret)

    async def story(world):
        await restart(world)
        assert secret not in kube.objects, "Secrets cannot be watched"
        document = gateway_pod()
        state = {"ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
        document["status"]["containerStatuses"] = [{"name": "gateway", "image": "i", **state}]
        kube.put(document)
        await world.until(lambda: secret in kube.objects)

    with_world(story, kube=kube)


def test_a_stored_service_without_the_part_is_left_as_it_is():
    async def story(world):
        kube = world.kube
        world.ask_for(service())
        await world.until(lambda: kube.named("RayCluster"))
        await world.rest()
        assert objects(kube) == set()
        assert not [path for verb, path in kube.calls if verb == "delete"]
        assert "gateway" not in kube.statuses[-1]
        assert kube.statuses[-1]["endpoint"] == "http://chat.team.svc:8000"

    with_world(story)


def with_applier(story):
    async def run():
        kube = FakeKube()
        await story(kube, Applier(kube, Drift(kube, lambda _: None), lambda *_: None, lambda *_: None))

    asyncio.run(run())


def test_an_object_of_another_owner_is_not_deleted():
    async def story(kube, applier):
        resolved = make_resolved(gateway={})
        ours = gateway_deployment(resolved, resolved.service.spec.gateway)
        theirs = ours | {"metadata": ours["metadata"] | {"ownerReferences": [{"uid": "uid-of-another"}]}}
        planned = Plan(deletions=(Deletion(path_of(ours), owner_uid="uid-1"),))
        kube.put(theirs)
        await applier.carry_out(("team", "chat"), planned, 300)
        assert kube.named("Deployment") == ["chat-gateway"]
        kube.put(ours)
        await applier.carry_out(("team", "chat"), planned, 300)
        await applier.carry_out(("team", "chat"), planned, 300)  # a missing Deployment is no error
        assert kube.named("Deployment") == []

    with_applier(story)


def test_the_key_is_never_rewritten_and_created_again_when_deleted():
    async def story(kube, applier):
        secret = gateway_secret(make_service(gateway={}), b"k" * 16)
        kube.put(secret | {"data": {"key": "of an operator with another key"}})
        for _ in range(2):
            await applier.carry_out(("team", "chat"), Plan(wanted=(secret,)), 300)
        assert kube.objects[path_of(secret)]["data"] == {"key": "of an operator with another key"}
        kube.remove(path_of(secret))
        await applier.carry_out(("team", "chat"), Plan(wanted=(secret,)), 0)
        assert kube.objects[path_of(secret)]["data"] == secret["data"]

    with_applier(story)
