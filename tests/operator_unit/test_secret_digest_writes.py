"""The digest of Secrets: when an operator writes it, and when its successor trusts it."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.decision import decide
from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.kube.client import KubeError, KubeUnreachable
from rayloom_operator.names import path_of
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.objects.secret_digest import SECRETS_ANNOTATION, has_digest, with_digest_of
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Verdict
from rayloom_operator.reconcile.apply import objects
from rayloom_operator.reconcile.apply.applier import Applier
from rt_fake_kube import FakeKube
from rt_operator import make_serving, turn
from rt_secret_digest import BEHIND, ENGINES, LATER_SECRETS, OPERATOR_KEY, SECRETS, SERVICE, TLS, changed, digest

KEY = ("team", "chat")
REPLICA = "chat-abcd-0"
OF_REPLICA = (config_map(BEHIND, "abcd"), admin_secret(SERVICE, "abcd", OPERATOR_KEY))
CLUSTER = ray_cluster(BEHIND, "abcd", 0)
ROUTE = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "Ingress",
    "metadata": {**ENGINES["metadata"], "name": "chat-gateway"},
}
OTHERS = (service_account(SERVICE), gateway_deployment(BEHIND, BEHIND.service.spec.gateway), *OF_REPLICA, ROUTE)


def planned(secrets=SECRETS, more=OTHERS, **fields):
    return Plan(wanted=(*secrets, with_digest_of(secrets, ENGINES, OPERATOR_KEY), *more), **fields)


@asynccontextmanager
async def operator(kube):
    """The applier of a new operator process, which has listed all objects."""
    drift = Drift(kube, lambda _: None)
    following = [asyncio.create_task(each.run()) for each in drift.reflectors]
    await drift.listed()
    yield Applier(kube, drift, lambda *_: None, lambda *_: None)
    for each in following:
        each.cancel()


def stored_digest(kube):
    return kube.objects[path_of(ENGINES)]["metadata"]["annotations"][SECRETS_ANNOTATION]


def missing(kube, plan):
    return [each["metadata"]["name"] for each in plan.wanted if path_of(each) not in kube.objects]


@pytest.mark.parametrize("error", [KubeError(403, "exceeded quota"), KubeError(500, "etcd leader changed")], ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_secret_that_cannot_be_written_keeps_no_other_object_from_being_repaired(number, error):
    async def story():
        kube, plan = FakeKube(), planned()
        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(new=frozenset({REPLICA})), 300)
            assert missing(kube, plan) == [] and stored_digest(kube) == digest(plan.wanted)
            for each in plan.wanted:
                kube.remove(path_of(each))
            name = SECRETS[number]["metadata"]["name"]
            kube.refusals = {(verb, name): error for verb in ("create", "update")}
            for _ in range(2):
                with pytest.raises(OperatorError, match=str(error)):
                    await applier.carry_out(KEY, plan, 0)
                assert missing(kube, plan) == [name]
                assert stored_digest(kube) == "", "the next operator writes the Secrets again"
            kube.refusals = {}
            await applier.carry_out(KEY, plan, 300)
            assert missing(kube, plan) == [] and stored_digest(kube) == digest(plan.wanted)

    asyncio.run(story())


def test_no_replica_is_created_that_would_wait_for_a_secret():
    async def story():
        kube, plan = FakeKube(), planned(more=(*OTHERS, CLUSTER), new=frozenset({REPLICA}))
        kube.refusals["create", SECRETS[0]["metadata"]["name"]] = KubeError(403, "exceeded quota")
        async with operator(kube) as applier:
            with pytest.raises(OperatorError):
                await applier.carry_out(KEY, plan, 300)
            assert missing(kube, plan)[1:] == [each["metadata"]["name"] for each in (*OF_REPLICA, CLUSTER)]
            kube.refusals = {}
            await applier.carry_out(KEY, plan, 300)
            assert missing(kube, plan) == []

    asyncio.run(story())


def writes(kube):
    """(verb, kind and name) of each write request."""
    return [(verb, "/".join(path.split("/")[-2:])) for verb, path in kube.calls]


def test_a_failure_on_which_a_user_has_to_act_is_raised_before_others():
    async def story():
        kube, account = FakeKube(), OTHERS[0]["metadata"]["name"]
        kube.refusals["apply", path_of(OTHERS[0])] = KubeError(500, "etcd leader changed")
        kube.refusals["create", SECRETS[0]["metadata"]["name"]] = KubeError(403, "exceeded quota")
        async with operator(kube) as applier:
            with pytest.raises(Refused, match="exceeded quota"):
                await applier.carry_out(KEY, planned(), 300)
            assert account in missing(kube, planned())

    asyncio.run(story())


def test_pods_are_created_after_what_they_need():
    async def story():
        kube, plan = FakeKube(), planned(more=(OTHERS[1], OTHERS[0]))
        async with operator(kube) as applier:
            await applier.carry_out(KEY, plan, 300)
            assert writes(kube)[-1] == ("apply", "deployments/chat-gateway")
            assert len(kube.calls) == len(plan.wanted), "a new service has no digest to remove"

    asyncio.run(story())


class Cut(FakeKube):
    """A cluster that loses the connection once, right after it has stored the renewed certificate of engines."""

    is_cut = False

    async def replace(self, manifest):
        await super().replace(manifest)
        if self.is_cut and manifest == LATER_SECRETS[1]:
            raise KubeUnreachable("the connection was cut after the API server had written the Secret")


def test_the_digest_is_empty_while_secrets_change():
    async def story():
        kube = FakeKube()
        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(), 300)
            kube.calls.clear()
            await applier.carry_out(KEY, planned(LATER_SECRETS), 300)
        names = [f"secrets/{each['metadata']['name']}" for each in LATER_SECRETS[1:]]
        around = ("apply", "services/chat-engines")
        assert writes(kube) == [around, *(("update", name) for name in names), around]

    asyncio.run(story())


@pytest.mark.parametrize("reason", [Reason.INVALID_SPEC, Reason.NOT_ALLOWED])
def test_certificates_that_are_written_while_the_spec_cannot_be_used_have_a_digest_too(reason):
    """The operator's key changes while the spec cannot be used, and then back."""

    def plan_of(key, **fields):
        before = turn(BEHIND, [make_serving(BEHIND)]).document
        found = turn(BEHIND, [make_serving(BEHIND)], previous=before).situation
        return decide(replace(found, settings=replace(TLS, operator_key=key), **fields)).plan

    unusable = {"resolved": None, "step": None, "accepted": Verdict(reason=reason, message="changed")}
    before, during = plan_of(b"k" * 16), plan_of(b"o" * 16, **unusable)

    async def story():
        kube = FakeKube()
        for plan in (before, during, before):
            wanted = [each for each in plan.wanted if each["kind"] in ("Secret", "Service")]
            async with operator(kube) as applier:
                await applier.carry_out(KEY, Plan(wanted=tuple(wanted)), 300)
            renewed = [each for each in wanted if "rayloom.dev/renewed" in each["metadata"]["labels"]]
            assert [kube.objects[path_of(each)]["data"] for each in renewed] == [each["data"] for each in renewed]
            assert stored_digest(kube) == digest(wanted) and len(renewed) == 2
            kube.calls.clear()
            async with operator(kube) as applier:
                await applier.carry_out(KEY, Plan(wanted=tuple(wanted)), 300)
            assert kube.calls == []

    asyncio.run(story())


class Noting(FakeKube):
    """A cluster that notes each digest that is written."""

    def __init__(self):
        super().__init__()
        self.digests = []

    async def apply(self, manifest, *, force=True):
        stored = await super().apply(manifest, force=force)
        if path_of(manifest) == path_of(ENGINES):
            self.digests.append(stored_digest(self))
        return stored


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_retry_after_the_failure_of_another_object_changes_neither_the_digest_nor_the_object_that_has_it(
    is_restarted,
):
    async def story():
        kube, plan = Noting(), planned(more=(*OTHERS[:2], CLUSTER))

        async def fail_twice(applier):
            before = kube.objects[path_of(ENGINES)]
            kube.digests.clear()
            kube.refusals["apply", path_of(CLUSTER)] = KubeError(403, "exceeded quota")
            for number in range(3):
                with pytest.raises(OperatorError, match="exceeded quota"):
                    await applier.carry_out(KEY, plan, 300)
                # Each retry applies all objects, and this one with equal content, so the API server writes nothing.
                assert kube.digests == number * [digest(plan.wanted)]
            assert without_versions(kube.objects[path_of(ENGINES)]) == without_versions(before)

        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(more=OTHERS[:2]), 300)
            if not is_restarted:
                await fail_twice(applier)
        if is_restarted:
            async with operator(kube) as applier:
                await fail_twice(applier)

    asyncio.run(story())


def without_versions(found):
    meta = {name: part for name, part in found["metadata"].items() if name != "resourceVersion"}
    return found | {"metadata": meta}


def test_after_a_write_of_the_digest_that_may_have_been_carried_out_the_next_change_empties_it_first():
    class Lost(Noting):
        is_lost = False

        async def apply(self, manifest, *, force=True):
            stored = await super().apply(manifest, force=force)
            if self.is_lost and has_digest(manifest):
                raise KubeError(504, "the request timed out")
            return stored

    async def story():
        kube, after = Lost(), planned(LATER_SECRETS)
        async with operator(kube) as applier:
            kube.is_lost = True
            with pytest.raises(OperatorError, match="timed out"):
                await applier.carry_out(KEY, planned(), 300)
            kube.is_lost = False
            await applier.carry_out(KEY, after, 300)
        assert kube.digests == [digest(planned().wanted), "", digest(after.wanted)]

    asyncio.run(story())


def test_a_digest_that_is_not_listed_in_time_is_emptied_before_secrets_change():
    async def story():
        kube, after = Noting(), planned(LATER_SECRETS)
        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(), 300)
        kube.digests.clear()
        kube.refusals["list", "/services"] = KubeError(500, "etcd leader changed")
        async with operator(kube) as applier:
            await applier.carry_out(KEY, after, 300)
        assert kube.digests == ["", digest(after.wanted)]

    asyncio.run(story())


def test_a_copy_of_the_annotation_on_another_object_does_not_pass_for_the_digest():
    async def story():
        kube, after = Noting(), planned(LATER_SECRETS)
        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(), 300)
        kube.put(with_digest_of(LATER_SECRETS, client_service(SERVICE), OPERATOR_KEY))
        kube.digests.clear()
        async with operator(kube) as applier:
            await applier.carry_out(KEY, after, 300)
        assert kube.digests == ["", digest(after.wanted)]

    asyncio.run(story())


@pytest.mark.parametrize("is_second", [False, True], ids=["by the first operator", "by the second operator"])
def test_after_an_interrupted_change_a_successor_that_wants_the_former_secrets_writes_them(is_second):
    """The settings of the third operator are those of the first again."""

    async def story():
        kube, before = Cut(), planned()

        async def change(applier):
            kube.is_cut = True
            with pytest.raises(KubeUnreachable):
                await applier.carry_out(KEY, planned(LATER_SECRETS), 300)
            assert stored_digest(kube) == ""

        async with operator(kube) as applier:
            await applier.carry_out(KEY, before, 300)
            if not is_second:
                await change(applier)
        if is_second:
            async with operator(kube) as applier:
                await change(applier)
        async with operator(kube) as applier:
            await applier.carry_out(KEY, before, 300)
        assert [kube.objects[path_of(each)]["data"] for each in SECRETS] == [each["data"] for each in SECRETS]
        assert stored_digest(kube) == digest(before.wanted)

    asyncio.run(story())


def test_a_digest_that_cannot_be_removed_does_not_keep_certificates_from_being_renewed():
    async def story():
        kube, after = FakeKube(), planned(LATER_SECRETS)
        async with operator(kube) as applier:
            await applier.carry_out(KEY, planned(), 300)
            kube.refusals["apply", "/chat-engines"] = KubeError(403, "a webhook forbids it")
            with pytest.raises(OperatorError, match="a webhook forbids it"):
                await applier.carry_out(KEY, after, 300)
            assert kube.objects[path_of(LATER_SECRETS[1])]["data"] == LATER_SECRETS[1]["data"]

    asyncio.run(story())


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_secrets_that_are_trusted_by_their_digest_are_written_again_within_the_interval(monkeypatch, share):
    monkeypatch.setattr(objects.random, "random", lambda: share)

    async def story():
        kube, plan, loop = FakeKube(), planned(), asyncio.get_running_loop()
        async with operator(kube) as applier:
            await applier.carry_out(KEY, plan, 300)
        kube.remove(path_of(SECRETS[0]))
        kube.put(changed(SECRETS[1], "tls.key"))
        kube.calls.clear()
        async with operator(kube) as applier:
            began = loop.time()
            for seconds, are_right in ((0, False), (300 * share - 1, False), (300 * share, True)):
                monkeypatch.setattr(loop, "time", lambda seconds=seconds: began + seconds)
                await applier.carry_out(KEY, plan, 300)
                found = [kube.objects.get(path_of(each), {}).get("data") for each in SECRETS]
                assert (found == [each["data"] for each in SECRETS]) is are_right
                assert bool(kube.calls) is are_right
            monkeypatch.undo()

    asyncio.run(story())
