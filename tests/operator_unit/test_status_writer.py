"""Statuses in which only texts change: if a write must wait, the next reconcile is at the time of the write."""

import asyncio

from rayloom_operator.kube.client import KubeError, KubeUnreachable
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.status_writer import StatusWriter
from rayloom_operator.telemetry.metrics import Metrics
from rt_fake_kube import FakeKube
from rt_operator import make_reading, make_resolved, make_said, make_serving, turn
from rt_world import SERVICE, service

KEY = ("team", "chat")


def said(reason, state="recovering"):
    resolved = make_resolved()
    return turn(resolved, [make_serving(resolved, reading=make_reading(make_said(state, reason=reason)))]).status


def test_words_alone_wait_and_all_else_is_written_at_once():
    async def story():
        kube, services = FakeKube(), PackedDict(Known.of)
        writer = StatusWriter(kube, services, Metrics(), lambda *_: None, lambda _: None)
        services[KEY] = kube.put(service())

        async def write(computed):
            return await writer.write(KEY, services[KEY], computed)

        assert await write(said("rank 0 is gone")) is None
        assert await write(said("rank 0 is gone")) is None
        assert await write(said("rank 1 is gone")) is None
        assert len(kube.statuses) == 2
        wait_s = await write(said("rank 2 is gone"))
        assert 4 < wait_s <= 5
        assert len(kube.statuses) == 2
        assert await write(said("", state="serving")) is None
        conditions = {each["type"]: each["status"] for each in kube.objects[SERVICE]["status"]["conditions"]}
        assert conditions["Available"] == "True"
        # A service that was deleted and recreated starts without a history.
        writer.forget(KEY)
        assert await write(said("rank 3 is gone")) is None
        assert await write(said("rank 4 is gone")) is None

    asyncio.run(story())


def test_a_definition_that_drops_the_rollout_state_is_an_error_that_names_the_cure(caplog):
    class OldDefinition(FakeKube):
        async def replace_status(self, manifest):
            rollout = {"currentRevision": manifest["status"]["rollout"]["currentRevision"]}
            return await super().replace_status(manifest | {"status": manifest["status"] | {"rollout": rollout}})

    async def story(kube):
        services = PackedDict(Known.of)
        services[KEY] = kube.put(service())
        writer = StatusWriter(kube, services, Metrics(), lambda *_: None, lambda _: None)
        await writer.write(KEY, services[KEY], said("", state="serving"))

    asyncio.run(story(FakeKube()))
    assert "status.rollout" not in caplog.text
    asyncio.run(story(OldDefinition()))
    assert "the API server dropped fields of status.rollout" in caplog.text
    assert "crds/llmservices.rayloom.dev.yaml" in caplog.text


def test_a_refused_event_is_dropped_and_one_without_an_answer_is_sent_again():
    async def story():
        kube, services = FakeKube(), PackedDict(Known.of)
        writer = StatusWriter(kube, services, Metrics(), lambda *_: None, lambda _: None)
        services[KEY] = kube.put(service())

        def events():
            return [each for each in kube.objects.values() if each["kind"] == "Event"]

        await writer.write(KEY, services[KEY], said("", state="serving"))
        (name,) = writer._events._unsent[KEY]
        kube.refusals = {("create", name): KubeUnreachable("no answer")}
        assert not await writer.send_events(KEY)
        kube.refusals = {("create", name): KubeError(403, "exceeded quota")}
        assert await writer.send_events(KEY)
        kube.refusals = {}
        assert await writer.send_events(KEY)
        assert events() == []

    asyncio.run(story())
