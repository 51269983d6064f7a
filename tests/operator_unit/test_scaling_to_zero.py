"""Scaling to zero with an operator that dies at any write, on an API server that records no field manager."""

import asyncio
from datetime import timedelta

import pytest

from rayloom_operator.api.autoscaling.stored import AutoscalingStatus
from rayloom_operator.decide.changes.plan import ScaleWrite
from rayloom_operator.decide.scaling.windows import Windows
from rayloom_operator.engines.status import ReportedLoad
from rayloom_operator.observe.observed import Observed
from rayloom_operator.reconcile.apply.scale import write_scale
from rayloom_operator.reconcile.gather.scaling import ScalingGatherer
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_operator import CLOCK, make_pod, make_reading, make_resolved, make_said, make_serving
from rt_scaling import planned
from rt_world import SERVICE, service

SPEC = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 10}, "gateway": {"replicas": 1}}


class Killed(BaseException):
    """The operator's process ends here."""


class Operator:
    """The scaler with its two kinds of writes. The process dies at write number `killed_at`, and is restarted."""

    def __init__(self, killed_at=-1, is_done=False):
        self.kube = FakeKube()
        self.kube.records_scale_manager = False
        self.kube.put(service(replicas=1, **SPEC))
        self.killed_at, self.is_done = killed_at, is_done
        self.writes = []  # (kind of the write, number of engines)
        self.at = 0.0
        self.begin()

    def begin(self):
        self.gatherer = ScalingGatherer(self.kube, Windows(10.0), lambda: 0.0)

    @property
    def document(self):
        return self.kube.objects[SERVICE]

    @property
    def scaling(self):
        return self.document.get("status", {}).get("autoscaling", {})

    async def look(self, *, num_held=0, engine=None):
        """One reconcile, two seconds after the last. `engine`: the engine's counts of requests."""
        self.at += 2
        try:
            await self._reconcile(num_held, engine or {})
        except Killed:
            self.begin()

    async def _reconcile(self, num_held, engine):
        document = await self.kube.get(SERVICE)
        replicas = document["spec"]["replicas"]
        resolved = make_resolved(replicas=replicas, **SPEC)
        seen = self._seen(resolved, num_held, engine)
        now = Now(CLOCK + timedelta(seconds=self.at), self.at)
        spec = resolved.service.spec
        found = await self.gatherer.next(
            ("team", "chat"), document, spec, seen, planned(resolved, seen, mono=self.at), now
        )
        if found.write is not None:
            generation = document["metadata"]["generation"]
            write = ScaleWrite(path=SERVICE, uid=document["metadata"]["uid"], generation=generation, after=found.write)
            await self._write("scale", found.write, lambda: write_scale(self.kube, write))
        status = {"autoscaling": AutoscalingStatus.of(found.state).model_dump(by_alias=True, exclude_none=True)}
        if status != document.get("status"):
            await self._write(
                "status", found.state.desired, lambda: self.kube.replace_status(document | {"status": status})
            )

    async def _write(self, kind, number, write):
        self.writes.append((kind, number))
        is_end = len(self.writes) - 1 == self.killed_at
        if not is_end or self.is_done:
            await write()
        if is_end:
            raise Killed

    def _seen(self, resolved, num_held, engine):
        count = resolved.service.spec.replicas
        load = ReportedLoad(max_running_tokens=100, prefill_tokens_per_second=1000.0)
        said = make_said(**engine).model_copy(update={"load": load})
        gateway = make_said("serving", nodes=(), token_age=None, waiting=num_held, in_flight=num_held)
        pod = make_pod("gateway", is_head=False)
        return Observed(
            replicas=tuple(
                make_serving(resolved, each, reading=make_reading(said, at=self.at)) for each in range(count)
            ),
            gateways=(pod,),
            gateway_readings={pod.name: make_reading(gateway, at=self.at)},
        )


def story(killed_at=-1, is_done=False):
    """Scales from one engine to none, and back for a held request."""

    async def play():
        it = Operator(killed_at, is_done)
        for _ in range(40):
            await it.look()
        assert (it.document["spec"]["replicas"], it.scaling["reason"]) == (0, "ScaledToZero")
        for _ in range(2):
            await it.look(num_held=1)
        assert (it.document["spec"]["replicas"], it.scaling["reason"]) == (1, "Woken")
        return it

    return asyncio.run(play())


WRITES = story().writes


def test_zero_is_stored_before_it_is_written():
    first = WRITES.index(("status", 0))
    assert WRITES[first : first + 3] == [("status", 0), ("scale", 0), ("status", 0)]


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("killed_at", range(WRITES.index(("scale", 1))))
def test_a_service_at_zero_wakes_whichever_write_was_the_last_of_a_process(killed_at, is_done):
    story(killed_at, is_done)


@pytest.mark.parametrize("at_once", [{"in_flight": 1}, {}])
def test_an_engine_whose_own_clients_have_requests_stays(at_once):
    """Requests through the engines' Service are in no gateway. Each may begin and end between two reconciles."""

    async def play():
        it = Operator()
        for number in range(60):
            await it.look(engine={"finished": 0 if at_once else number // 3, **at_once})
            assert it.document["spec"]["replicas"] == 1
        for _ in range(20):
            await it.look(engine={"finished": 20})
        assert it.document["spec"]["replicas"] == 0

    asyncio.run(play())
