"""Sizings are computed in a separate thread. A computation that takes too long is no fault of the spec."""

import asyncio
import threading

import pytest

from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.errors import DoesNotFit, OperatorError, SpecError
from rayloom_operator.objects.old_spec import old_spec
from rayloom_operator.reconcile.gather import old_specs, sizer, spec_reader
from rayloom_operator.reconcile.gather.old_specs import OldSpecs
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.resolve.resolved import Hub
from rayloom_operator.resolve.revision import revision
from rt_fake_kube import FakeKube
from rt_operator import make_resolved
from rt_world import service, with_world


def test_a_computation_that_takes_too_long_is_retried_in_the_one_thread(monkeypatch):
    begun, released = threading.Event(), threading.Event()

    def compute():
        begun.set()
        released.wait(60)

    async def story():
        computing = Sizer()
        first = asyncio.create_task(computing.run(compute))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        # The thread is busy, so another computation does not begin.
        began = []
        monkeypatch.setattr(sizer, "_LIMIT_S", 0.05)
        with pytest.raises(OperatorError, match=r"not computed within 0\.05 s") as caught:
            await computing.run(began.append, 1)
        assert not isinstance(caught.value, SpecError)
        released.set()
        await first
        monkeypatch.setattr(sizer, "_LIMIT_S", 60)
        first, second = await computing.run(threading.get_ident), await computing.run(threading.get_ident)
        assert first == second != threading.get_ident()
        assert began == []
        computing.close()

    monkeypatch.setattr(sizer, "_LIMIT_S", 60)
    asyncio.run(story())


def test_an_exception_of_a_computation_is_raised():
    def fails():
        raise DoesNotFit(("spec.accelerator: too small",))

    async def story():
        with pytest.raises(DoesNotFit, match="too small"):
            await Sizer().run(fails)

    asyncio.run(story())


def test_a_slow_sizing_changes_no_status_and_the_service_is_made_once_it_ends(monkeypatch):
    real, released, asked = spec_reader.resolve, threading.Event(), threading.Event()

    def slow(*arguments):
        asked.set()
        assert released.wait(30)
        return real(*arguments)

    monkeypatch.setattr(spec_reader, "resolve", slow)
    monkeypatch.setattr(sizer, "_LIMIT_S", 0.05)

    async def story(world):
        failures = []
        reconcile = world.controller._reconciler.reconcile

        async def noted(key, document):
            try:
                return await reconcile(key, document)
            except OperatorError as error:
                failures.append(error)
                raise

        world.controller._reconciler.reconcile = noted
        world.ask_for(service())
        # The thread may not have started when the time is over. Then nothing was computed, and the reconcile is tried
        # again.
        await world.until(lambda: failures and asked.is_set())
        assert world.kube.statuses == []
        monkeypatch.setattr(sizer, "_LIMIT_S", 30)
        released.set()
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert world.reason("Accepted") != "InvalidSpec"

    with_world(story)


def test_an_old_spec_is_read_in_the_thread_as_well(monkeypatch):
    threads, real = [], old_specs.resolved_of

    def noted(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    monkeypatch.setattr(old_specs, "resolved_of", noted)

    async def story():
        kube, resolved = FakeKube(), make_resolved()
        name = revision(resolved)
        kube.put(old_spec(resolved, name, None))
        document = {
            "metadata": {
                "name": "chat",
                "namespace": "team",
                "uid": "uid-1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
        }
        specs = OldSpecs(kube, Hub(), Permissions(), Sizer())
        assert list(await specs.of(("team", "chat"), document, [name])) == [name]

    asyncio.run(story())
    (thread,) = threads
    assert thread != threading.get_ident()
