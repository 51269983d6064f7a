"""The scaler in the controller: its writes, its status and its Events; the cluster is a dictionary."""

import asyncio

import pytest

from rayloom_operator.decide.changes.plan import ScaleWrite
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import INVALID, KubeError
from rayloom_operator.reconcile.apply.scale import write_scale
from rt_fake_kube import FakeKube
from rt_world import SERVICE, service, with_world

SCALING = {"minReplicas": 1, "maxReplicas": 2}


def scaled(kube):
    return kube.statuses[-1].get("autoscaling", {})


def wrote_scale(kube):
    return kube.calls.count(("patch", f"{SERVICE}/scale"))


def by(writer, document, generation):
    """The document after a write by another client."""
    fields = {"manager": writer, "time": "2026-02-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    meta = document["metadata"] | {"generation": generation, "managedFields": [fields]}
    return document | {"metadata": meta}


def test_a_number_outside_the_bounds_is_written_once_and_said():
    async def story(world):
        kube = world.kube
        world.ask_for(service(replicas=5, autoscaling=SCALING))
        await world.until(lambda: wrote_scale(kube))
        assert kube.objects[SERVICE]["spec"]["replicas"] == 2
        world.controller.set_service(await kube.get(SERVICE), False)  # the event of the write
        await world.until(lambda: kube.statuses[-1]["ready"] == "0/2")
        await world.rest()
        assert wrote_scale(kube) == 1
        assert (scaled(kube)["desiredReplicas"], scaled(kube)["reason"]) == (2, "Bounded")
        assert scaled(kube)["writer"] == "rayloom-operator-scaler"
        events = [each for each in kube.objects.values() if each["kind"] == "Event" and each["reason"] == "Bounded"]
        assert [each["note"] for each in events] == ["replicas 5 -> 2: minReplicas 1 and maxReplicas 2 are the bounds."]
        metrics = world.controller._metrics.text().decode()
        assert 'autoscaling_desired_replicas{service="chat",service_namespace="team"} 2.0' in metrics
        assert 'scalings_total{direction="down"} 1.0' in metrics

    with_world(story)


def test_another_writer_is_named_and_kept_within_the_bounds():
    async def story(world):
        kube = world.kube
        world.ask_for(service(replicas=1, autoscaling=SCALING))
        await world.until(lambda: kube.statuses and scaled(kube))
        await world.rest()
        status = {"status": kube.statuses[-1]}
        world.ask_for(by("kube-controller-manager", service(replicas=2, autoscaling=SCALING) | status, 2))
        await world.until(lambda: scaled(kube).get("reason") == "OtherWriter")
        assert (scaled(kube)["desiredReplicas"], scaled(kube)["writer"]) == (2, "kube-controller-manager")
        assert "Two autoscalers write replicas" in scaled(kube)["message"]
        await world.rest()
        assert wrote_scale(kube) == 0

    with_world(story)


def test_a_write_of_a_user_at_the_same_moment_wins():
    kube = FakeKube()
    generation = kube.put(service(replicas=5))["metadata"]["generation"]
    kube.put(service(replicas=3))
    late = ScaleWrite(path=SERVICE, uid="uid-1", generation=generation, after=2)
    with pytest.raises(OperatorError, match="changed while the scaler decided"):
        asyncio.run(write_scale(kube, late))
    assert kube.objects[SERVICE]["spec"]["replicas"] == 3


def test_a_policy_that_refuses_the_write_is_reported():
    kube = FakeKube()
    generation = kube.put(service(replicas=5))["metadata"]["generation"]
    kube.refusals["patch", "/scale"] = KubeError(INVALID, "no more than five")
    with pytest.raises(KubeError, match="no more than five"):
        asyncio.run(write_scale(kube, ScaleWrite(path=SERVICE, uid="uid-1", generation=generation, after=6)))


class EditedKube(FakeKube):
    """A cluster in which a user removes `spec.autoscaling` just before the scaler's patch arrives."""

    async def scale(self, path, version, replicas, manager):
        self.put(service(replicas=5))
        await super().scale(path, version, replicas, manager)


@pytest.mark.parametrize("is_early", [True, False])
def test_no_write_lands_after_a_user_removed_the_section(is_early):
    kube = FakeKube() if is_early else EditedKube()
    generation = kube.put(service(replicas=5, autoscaling=SCALING))["metadata"]["generation"]
    if is_early:
        kube.put(service(replicas=5))
    with pytest.raises(OperatorError, match="changed while the scaler decided"):
        asyncio.run(write_scale(kube, ScaleWrite(path=SERVICE, uid="uid-1", generation=generation, after=2)))
    assert kube.objects[SERVICE]["spec"] == service(replicas=5)["spec"]


def test_a_refused_write_is_in_no_status_event_or_metric():
    async def story(world):
        kube = world.kube
        kube.refusals["patch", "/scale"] = KubeError(403, "no rights to scale")
        world.ask_for(service(replicas=5, autoscaling=SCALING))
        await world.until(lambda: kube.statuses and wrote_scale(kube))
        await world.rest()
        assert kube.objects[SERVICE]["spec"]["replicas"] == 5
        assert all("autoscaling" not in each for each in kube.statuses)
        assert not [each for each in kube.objects.values() if each["kind"] == "Event" and each["reason"] == "Bounded"]
        assert 'scalings_total{direction="down"}' not in world.controller._metrics.text().decode()

    with_world(story)


@pytest.mark.parametrize("records_manager", [True, False])
def test_the_refusal_of_another_object_leaves_the_scalers_write_in_the_status(records_manager):
    async def story(world):
        kube = world.kube
        kube.records_scale_manager = records_manager
        kube.refusals["apply", "/services/chat"] = KubeError(403, "no Services here")
        world.ask_for(service(replicas=5, autoscaling=SCALING))
        await world.until(lambda: wrote_scale(kube) and kube.statuses)
        await world.rest()
        assert (scaled(kube)["desiredReplicas"], scaled(kube)["reason"]) == (2, "Bounded")
        assert "no Services here" in world.message()
        kube.refusals.clear()
        world.controller.set_service(await kube.get(SERVICE), False)
        await world.until(lambda: "no Services here" not in world.message())
        assert (scaled(kube)["reason"], scaled(kube)["writer"]) == ("Bounded", "rayloom-operator-scaler")

    with_world(story)


def test_a_zero_that_was_announced_is_the_scalers_own_after_a_restart():
    async def story(world):
        kube = world.kube
        scaling = {"minReplicas": 0, "maxReplicas": 2}
        status = {"status": {"autoscaling": {"desiredReplicas": 0, "reason": "ScalingToZero", "message": "m"}}}
        world.ask_for(service(replicas=0, autoscaling=scaling, gateway={}) | status)
        await world.until(lambda: kube.statuses and scaled(kube).get("reason") == "ScaledToZero")
        assert world.reason() == "ScaledToZero"

    with_world(story)


def test_without_autoscaling_nothing_is_written_and_its_status_goes():
    async def story(world):
        kube = world.kube
        world.ask_for(service(replicas=1, autoscaling=SCALING))
        await world.until(lambda: kube.statuses and scaled(kube))
        await world.rest()
        off = service(replicas=7) | {"status": kube.statuses[-1]}
        off["metadata"]["generation"] = 2
        world.ask_for(off)
        await world.until(lambda: kube.statuses[-1]["ready"] == "0/7")
        await world.rest()
        assert "autoscaling" not in kube.statuses[-1]
        assert wrote_scale(kube) == 0
        assert "autoscaling_desired_replicas{" not in world.controller._metrics.text().decode()

    with_world(story)
