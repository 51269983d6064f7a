"""Reconciles that end between two requests: the next completes them, and recognises the operator's objects."""

import asyncio

import pytest

from rayloom_operator.decide.changes.plan import Plan, _own_objects
from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.kube.client import KubeError, KubeUnreachable
from rayloom_operator.names import path_of
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.old_spec import old_spec
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.drift import Drift
from rayloom_operator.reconcile.apply.applier import Applier
from rt_fake_kube import FakeKube
from rt_operator import make_resolved, make_service

KEY = ("team", "chat")
GROUP = "chat-abcd-0"
OLD_SPEC = old_spec(make_resolved(), "abcd", None)
SERVICE = client_service(make_service())
SECRET = admin_secret(make_service(), "abcd", b"key")
CONFIG_MAP = config_map(make_resolved(), "abcd")
SHARED = (service_account(make_service()), SERVICE, disruption_budget(make_service()), network_policy(make_service()))
WANTED = (*SHARED, OLD_SPEC, CONFIG_MAP, SECRET, ray_cluster(make_resolved(), "abcd", 0))
PLANNED = Plan(wanted=WANTED, new=frozenset({GROUP, OLD_SPEC["metadata"]["name"]}))


class Killed(BaseException):
    """The operator's process ends here."""


class Interrupted(FakeKube):
    """A cluster in which the request with the number `at` fails, before or after the API server has executed it."""

    def __init__(self, at, error, is_done):
        super().__init__()
        self.at, self.error, self.is_done = at, error, is_done

    async def create(self, manifest):
        return await self._once(lambda: super(Interrupted, self).create(manifest))

    async def apply(self, manifest, *, force=True):
        return await self._once(lambda: super(Interrupted, self).apply(manifest, force=force))

    async def _once(self, step):
        is_now = len(self.calls) == self.at and self.error is not None
        if not is_now:
            return await step()
        error, self.error = self.error, None
        if self.is_done:
            await step()
        else:
            self.calls.append(("lost", ""))
        raise error


def new_applier(kube):
    return Applier(kube, Drift(kube, lambda _: None), lambda *_: None, lambda *_: None)


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KubeError(500, "etcd leader changed"), KubeUnreachable("none"), Killed()], ids=type)
@pytest.mark.parametrize("at", range(len(WANTED)))
@pytest.mark.parametrize("order", [1, -1], ids=["planned", "reversed"])
def test_a_reconcile_that_ends_at_any_request_is_finished_by_the_next(at, error, is_done, order):
    planned = Plan(wanted=WANTED[::order], new=PLANNED.new)

    async def story():
        kube = Interrupted(at, error, is_done)
        applier = new_applier(kube)
        with pytest.raises(type(error)):
            await applier.carry_out(KEY, planned, 300)
        if isinstance(error, Killed):
            applier = new_applier(kube)
        await applier.carry_out(KEY, planned, 300)
        for each in WANTED:
            found = kube.objects[path_of(each)]
            assert found["metadata"]["ownerReferences"] == each["metadata"]["ownerReferences"]

    asyncio.run(story())


@pytest.mark.parametrize("failed", ["secrets", "configmaps"])
def test_a_group_that_went_in_part_leaves_no_secret_that_nobody_owns(failed):
    """The Secret is deleted first. A Secret that is left would count as another owner's when its name is used again."""

    async def story():
        kube = FakeKube()
        applier = new_applier(kube)
        await applier.carry_out(KEY, PLANNED, 300)
        (path,) = [each for each in kube.objects if f"/{failed}/" in each]
        kube.refusals["delete", path] = KubeError(500, "etcd leader changed")
        for deletion in _own_objects(GROUP, "team"):
            try:
                await kube.delete(deletion.path)
            except KubeError:
                break  # the operator is killed here
        kube.refusals.clear()
        kube.remove(kube.path("RayCluster"))
        again = new_applier(kube)
        await again.carry_out(KEY, PLANNED, 300)
        assert kube.named("Secret") == [f"{GROUP}-admin"]

    asyncio.run(story())


def test_a_strangers_service_that_its_user_deletes_heals():
    async def story():
        kube = FakeKube()
        meta = {"name": "chat", "namespace": "team"}
        theirs = kube.put({"apiVersion": "v1", "kind": "Service", "metadata": meta})
        applier = new_applier(kube)
        for _ in range(2):
            with pytest.raises(Refused, match="the Service chat exists and is not ours"):
                await applier.carry_out(KEY, PLANNED, 300)
        assert kube.objects[path_of(SERVICE)] == theirs
        kube.remove(path_of(SERVICE))
        await applier.carry_out(KEY, PLANNED, 300)
        assert kube.objects[path_of(SERVICE)]["spec"] == SERVICE["spec"]
        assert kube.named("Secret") == [f"{GROUP}-admin"]

    asyncio.run(story())


def test_a_strangers_secret_is_left_alone_whatever_else_fails():
    async def story():
        kube = FakeKube()
        theirs = kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": SECRET["metadata"] | {"labels": {}}})
        applier = new_applier(kube)
        for end in ("services/chat", f"configmaps/{GROUP}"):
            for verb in ("apply", "create"):
                kube.refusals = {(verb, end): KubeError(500, "etcd leader changed")}
                with pytest.raises(OperatorError):
                    await applier.carry_out(KEY, Plan(wanted=WANTED[:-1], new=PLANNED.new), 300)
                assert kube.objects[path_of(SECRET)] == theirs

    asyncio.run(story())


def paths_of(manifests):
    return sorted(map(path_of, manifests))


def test_the_owner_of_an_object_is_read_before_the_first_apply_alone(monkeypatch):
    async def story():
        kube = FakeKube()
        applier = new_applier(kube)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: 1000.0)
        planned = Plan(wanted=SHARED)
        await applier.carry_out(KEY, planned, 300)
        assert sorted(kube.gets) == paths_of(SHARED)
        assert len(kube.calls) == 4
        # Half an hour later all objects are applied again.
        monkeypatch.setattr(loop, "time", lambda: 2800.0)
        kube.gets.clear()
        kube.calls.clear()
        await applier.carry_out(KEY, planned, 300)
        assert (kube.gets, len(kube.calls)) == ([], 4)
        # No watch has reported this deletion. So the API server refuses the applied uid, and the operator reads the
        # object's owner.
        kube.remove(path_of(SERVICE))
        meta = {"name": "chat", "namespace": "team"}
        theirs = kube.put({"apiVersion": "v1", "kind": "Service", "metadata": meta})
        monkeypatch.setattr(loop, "time", lambda: 4600.0)
        with pytest.raises(Refused, match="the Service chat exists and is not ours"):
            await applier.carry_out(KEY, planned, 300)
        assert kube.gets == [path_of(SERVICE)]
        assert kube.objects[path_of(SERVICE)] == theirs

    asyncio.run(story())


def test_the_owner_of_an_object_that_somebody_has_changed_is_read_again():
    async def story():
        kube = FakeKube()
        drift = Drift(kube, lambda _: None)
        applier = Applier(kube, drift, lambda *_: None, lambda *_: None)
        await applier.carry_out(KEY, Plan(wanted=SHARED), 300)
        assert drift.uid_of_ours(KEY, "Service", "chat") is not None
        kube.gets.clear()
        changed = kube.put(SERVICE | {"spec": {}})
        drift.reflectors[0].take("MODIFIED", changed)
        assert drift.uid_of_ours(KEY, "Service", "chat") is None
        await applier.carry_out(KEY, Plan(wanted=SHARED), 300)
        assert kube.gets == [path_of(SERVICE)]
        assert kube.objects[path_of(SERVICE)]["spec"] == SERVICE["spec"]

    asyncio.run(story())
