"""Leader election: two processes never write at once, with late or lost requests and clocks of any speed."""

import asyncio
import heapq
import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.kube.client import CONFLICT, KubeError
from rayloom_operator.kube.election import Election, LeaseLost, LeaseRecord
from rayloom_operator.kube.lease import Lease
from rt_fake_kube import FakeKube

SECONDS = 6


def record(holder="other", version="1", seconds=SECONDS):
    return LeaseRecord(holder=holder, seconds=seconds, transitions=3, acquired="then", version=version)


def test_a_free_lease_is_taken_at_once_and_counts_from_before_the_request():
    election = Election("me", SECONDS)
    election.saw(None, 100.0)
    assert election.wait_seconds(100.0) == 0
    election.won(election.claim("now"), 100.0)
    # Three quarters of 6 s.
    assert [election.may_write(now) for now in (100.0, 104.4, 104.5)] == [True, True, False]


def test_the_lease_of_another_process_is_taken_once_it_has_not_changed_for_its_time():
    election = Election("me", SECONDS)
    election.saw(record(version="1"), 100.0)
    election.saw(record(version="1"), 105.0)
    assert election.wait_seconds(105.0) == 1.0
    election.saw(record(version="2"), 105.5)
    assert election.wait_seconds(106.0) == 5.5
    assert election.wait_seconds(111.5) == 0
    claimed = election.claim("now")
    assert (claimed.holder, claimed.transitions, claimed.acquired, claimed.version) == ("me", 4, "now", "2")


def test_a_released_lease_is_taken_at_once():
    election = Election("me", SECONDS)
    election.saw(record(holder="", seconds=1), 100.0)
    assert election.wait_seconds(100.0) == 0


@pytest.mark.parametrize("found", [record("other"), record(""), None], ids=["taken", "released", "deleted"])
def test_a_process_that_has_led_never_leads_again_after_another(found):
    election = Election("me", SECONDS)
    election.saw(None, 0.0)
    election.won(election.claim("now"), 0.0)
    with pytest.raises(LeaseLost):
        election.saw(found, 1.0)
    assert not election.may_write(1.0)


def test_a_process_that_was_stopped_for_long_leads_on_if_no_other_led_in_the_meantime():
    election = Election("me", SECONDS)
    election.saw(None, 0.0)
    election.won(record("me", "1"), 0.0)
    assert not election.may_write(20.0)
    election.saw(record("me", "1"), 20.0)
    assert election.wait_seconds(20.0) == 0
    election.won(record("me", "2"), 20.0)
    assert election.may_write(20.1)


class World:
    """Two processes and a Lease that the first process holds. Time is real time; each process has a clock of its own.

    In its turn, a process reads the Lease, and writes it if the election wants a write. Each request takes the seconds
    of the turn, and reaches the server after half of them. With `is_lost` there is no response. At the end of its turn,
    the process sleeps, perhaps for very long.
    """

    def __init__(self, rates):
        self.events = []
        self.order = itertools.count(1)
        self.rates = rates
        self.elections = [Election(f"c{index}", SECONDS) for index in (0, 1)]
        self.has_ended = [False, False]
        self.lease = record("c0", str(next(self.order)))
        self.elections[0].won(self.lease, self.clock(0, 0.0))

    def at(self, time, action):
        heapq.heappush(self.events, (time, next(self.order), action))

    def clock(self, who, time):
        return (1000.0, -50.0)[who] + self.rates[who] * time

    def run(self, turns):
        for who in (0, 1):
            self.at(0.0, lambda time, who=who: self.turn(who, time, list(turns[who])))
        while self.events:
            time, _, action = heapq.heappop(self.events)
            action(time)
            writers = [who for who in (0, 1) if self.elections[who].may_write(self.clock(who, time))]
            assert len(writers) < 2, f"both may write at {time}"

    def turn(self, who, time, turns):
        if self.has_ended[who] or not turns:
            return
        (seconds, is_lost, sleep), rest = turns[0], turns[1:]
        # The time there and back, or the timeout of a request.
        self.at(time + (1.5 if is_lost else seconds) + sleep, lambda then: self.turn(who, then, rest))
        if is_lost:
            self.write_if_due(who, time, seconds, is_lost)
            return

        def reached(then):
            found = self.lease
            self.at(then + seconds / 2, lambda later: self.read(who, later, found, seconds))

        self.at(time + seconds / 2, reached)

    def read(self, who, time, found, seconds):
        try:
            self.elections[who].saw(found, self.clock(who, time))
            self.write_if_due(who, time, seconds, False)
        except LeaseLost:
            self.has_ended[who] = True

    def write_if_due(self, who, time, seconds, is_lost):
        election = self.elections[who]
        if election.wait_seconds(self.clock(who, time)) > 0:
            return
        claimed = election.claim("now")

        def reached(then):
            if (self.lease.version if self.lease else "") == claimed.version:
                self.lease = replace(claimed, version=str(next(self.order)))
                if not is_lost:
                    won = self.lease
                    self.at(then + seconds / 2, lambda _: election.won(won, self.clock(who, time)))

        self.at(time + seconds / 2, reached)


turns = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 2.5]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([0.1, 1.5, 5.5, 20.0]),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=500)
@given(rates=st.sampled_from([(1.0, 1.0), (0.88, 1.12), (1.12, 0.88)]), turns=st.tuples(turns, turns))
def test_never_may_two_processes_write(rates, turns):
    World(rates).run(turns)


class Cluster(FakeKube):
    """A cluster that the threads of several processes use."""

    def __init__(self):
        super().__init__()
        self.is_away = False

    async def get(self, path):
        if self.is_away:
            raise KubeError(500, "away")
        return await super().get(path)

    async def patch(self, path, body):
        if self.is_away:
            raise KubeError(500, "away")
        return await super().patch(path, body)


def make_lease(kube, identity, seconds=1):
    return Lease(namespace="system", name="operator", identity=identity, seconds=seconds, connect=lambda: kube)


def holder(kube):
    return kube.objects["/apis/coordination.k8s.io/v1/namespaces/system/leases/operator"]["spec"]["holderIdentity"]


def test_a_released_lease_goes_to_a_standby():
    async def run():
        kube = Cluster()
        a, b = make_lease(kube, "a"), make_lease(kube, "b")
        leads = {name: asyncio.Event() for name in "ab"}
        first = asyncio.create_task(a.run(leads["a"].set))
        async with asyncio.timeout(60):
            await leads["a"].wait()
            second = asyncio.create_task(b.run(leads["b"].set))
            await asyncio.sleep(0)
            assert (a.may_write(), b.may_write(), holder(kube)) == (True, False, "a")
            a.stop()
            await first
            assert (a.may_write(), holder(kube)) == (False, "")
            await leads["b"].wait()
            assert holder(kube) == "b"
            b.stop()
            await second

    asyncio.run(run())


def test_a_standby_leads_after_a_leader_that_was_killed():
    async def run():
        kube = Cluster()
        a, b = make_lease(kube, "a"), make_lease(kube, "b")
        leads = {name: asyncio.Event() for name in "ab"}
        first = asyncio.create_task(a.run(leads["a"].set))
        async with asyncio.timeout(20):
            await leads["a"].wait()
            first.cancel()  # like a kill: the Lease is not released
            a._election.stop()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.create_task(b.run(leads["b"].set))
            await leads["b"].wait()
            assert (
                kube.objects["/apis/coordination.k8s.io/v1/namespaces/system/leases/operator"]["spec"][
                    "leaseTransitions"
                ]
                == 1
            )
            b.stop()
            await second

    asyncio.run(run())


def test_a_leader_ends_once_another_leads():
    async def run():
        kube = Cluster()
        a = make_lease(kube, "a")
        leads = asyncio.Event()
        task = asyncio.create_task(a.run(leads.set))
        async with asyncio.timeout(60):
            await leads.wait()
            path = "/apis/coordination.k8s.io/v1/namespaces/system/leases/operator"
            found = kube.objects[path]
            kube.put(found | {"spec": found["spec"] | {"holderIdentity": "b"}})
            with pytest.raises(LeaseLost, match="the lease went to b"):
                await task
            assert (a.may_write(), holder(kube)) == (False, "b")

    asyncio.run(run())


def test_a_leader_survives_an_unreachable_api_server_and_writes_nothing_in_the_meantime():
    async def run():
        kube = Cluster()
        a = make_lease(kube, "a")
        leads = asyncio.Event()
        task = asyncio.create_task(a.run(leads.set))
        async with asyncio.timeout(60):
            await leads.wait()
            kube.is_away = True
            while a.may_write():
                await asyncio.sleep(0.01)
            kube.is_away = False
            while not a.may_write():
                await asyncio.sleep(0.01)
            a.stop()
            await task

    asyncio.run(run())


def test_a_lease_that_cannot_be_created_is_logged_once_and_retried(caplog):
    async def run():
        kube = Cluster()
        kube.refusals["create", "/operator"] = KubeError(403, "forbidden")
        a = make_lease(kube, "a")
        leads = asyncio.Event()
        task = asyncio.create_task(a.run(leads.set))
        async with asyncio.timeout(60):
            while len([call for call in kube.calls if call[0] == "create"]) < 2:
                await asyncio.sleep(0.01)
            kube.refusals.clear()
            await leads.wait()
            a.stop()
            await task

    asyncio.run(run())
    assert caplog.text.count("cannot be read or written: forbidden") == 1


def test_it_runs_in_a_thread_and_is_stopped_from_another():
    kube = Cluster()
    a = make_lease(kube, "a", seconds=60)
    leads = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(a.run(leads.set)))
    thread.start()
    assert leads.wait(60)
    assert a.may_write()
    a.stop()
    thread.join(60)
    assert (thread.is_alive(), a.may_write(), holder(kube)) == (False, False, "")


def test_a_conflict_is_not_logged(caplog):
    async def run():
        kube = Cluster()
        kube.put(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"namespace": "system", "name": "operator"},
                "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
            }
        )
        kube.refusals["patch", "/operator"] = KubeError(CONFLICT, "modified")
        a = make_lease(kube, "a")
        leads = asyncio.Event()
        task = asyncio.create_task(a.run(leads.set))
        async with asyncio.timeout(60):
            while ("patch", "/apis/coordination.k8s.io/v1/namespaces/system/leases/operator") not in kube.calls:
                await asyncio.sleep(0.01)
            kube.refusals.clear()
            await leads.wait()
            a.stop()
            await task

    asyncio.run(run())
    assert "modified" not in caplog.text
