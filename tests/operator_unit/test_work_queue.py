"""The queue: no key is lost or reconciled twice at the same time, and failures are requeued with a growing delay."""

import asyncio
import itertools

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_steps import is_at_rest, stop, until
from rayloom_operator.reconcile.work_queue import WorkQueue


@settings(deadline=None, max_examples=50)
@given(
    adds=st.lists(st.sampled_from("abc"), min_size=1, max_size=30),
    hows=st.lists(st.sampled_from([{}, {"is_changed": True}, {"is_new": True}]), min_size=30, max_size=30),
    limit=st.integers(1, 4),
    pauses=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=5),
)
def test_each_key_is_reconciled_after_its_last_change_once_at_a_time_in_the_limit(adds, hows, limit, pauses, turns):
    async def run():
        queue = WorkQueue(limit)
        version, seen, working, mistakes, lengths = {}, {}, [], [], itertools.cycle(turns)

        async def handle(key):
            working.append(key)
            # An assertion here would not fail the test: the queue treats an exception of a reconcile as a failure.
            if working.count(key) > 1 or len(working) > limit:
                mistakes.append(list(working))
            read = version[key]
            for _ in range(next(lengths)):
                await asyncio.sleep(0)
            working.remove(key)
            seen[key] = read

        worker = asyncio.create_task(queue.work(handle))
        for key, how, pause in zip(adds, hows, pauses, strict=False):
            version[key] = version.get(key, 0) + 1
            queue.add(key, **how)
            for _ in range(pause):
                await asyncio.sleep(0)
        await until(lambda: seen == version and is_at_rest(queue))
        await stop([worker])
        assert mistakes == []

    asyncio.run(run())


def test_a_key_that_waits_is_in_the_queue_once():
    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)

        for key in "aabab":
            queue.add(key)
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: len(turns) == 2)
        await stop([worker])
        assert turns == ["a", "b"]

    asyncio.run(run())


def test_the_delay_doubles_with_each_failure_and_success_resets_it(monkeypatch):
    delays, turns = [], []

    async def run():
        queue = WorkQueue()
        monkeypatch.setattr(queue, "add_after", lambda key, seconds: delays.append(seconds))
        outcomes = iter([ValueError(), ValueError(), ValueError(), None, ValueError(), 7.0])

        async def handle(key):
            turns.append(key)
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        worker = asyncio.create_task(queue.work(handle))
        for num_turns in range(1, 7):
            queue.add("a")
            await until(lambda num_turns=num_turns: len(turns) == num_turns)
        await until(lambda: not queue._working)
        assert next(outcomes, "none") == "none"
        await stop([worker])

    asyncio.run(run())
    assert delays == [0.5, 1.0, 2.0, 0.5, 7.0]


def test_the_two_thousandth_failure_in_a_row_is_requeued_like_the_tenth(monkeypatch):
    delays = []

    async def run():
        queue = WorkQueue()
        monkeypatch.setattr(queue, "add_after", lambda key, seconds: (delays.append(seconds), queue.add(key)))

        async def handle(key):
            await asyncio.sleep(0)
            raise ValueError

        worker = asyncio.create_task(queue.work(handle))
        queue.add("a")
        await until(lambda: len(delays) >= 2000 or worker.done())
        await stop([worker])

    asyncio.run(run())
    assert delays[9:2000] == [10.0] * 1991


def test_the_earlier_of_two_requeues_counts():
    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)

        queue.add_after("a", 0.01)
        queue.add_after("a", 1000)
        queue.add_after("b", 1000)
        queue.add_after("b", 0.01)
        worker = asyncio.create_task(queue.work(handle))
        async with asyncio.timeout(60):
            while len(turns) < 2:
                await asyncio.sleep(0.01)
        await stop([worker])
        assert sorted(turns) == ["a", "b"]

    asyncio.run(run())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_requeue_that_is_due_at_once_may_be_repeated(loop_factory):
    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)

        for seconds in (0.0, 0.0001, 0.0, 5.0):
            queue.add_after("a", seconds)
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: turns)
        await stop([worker])
        assert (turns, queue.depth, queue._timers) == (["a"], 0, {})

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


def test_an_event_waits_after_a_failure_but_a_changed_spec_does_not():
    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)
            if key == "a":
                raise ValueError

        worker = asyncio.create_task(queue.work(handle))
        queue.add("a")
        await until(lambda: turns == ["a"] and not queue._working)
        queue.add("a")
        queue.add("b")
        await until(lambda: "b" in turns)
        assert turns == ["a", "b"]
        queue.add("a", is_changed=True)
        await until(lambda: turns == ["a", "b", "a"])
        await stop([worker])

    asyncio.run(run())


def test_a_drain_ends_running_reconciles_and_starts_none():
    async def run():
        queue, turns, may_end = WorkQueue(2), [], asyncio.Event()

        async def handle(key):
            turns.append(key)
            await may_end.wait()

        worker = asyncio.create_task(queue.work(handle))
        queue.add("a")
        await until(lambda: turns == ["a"])
        drained = asyncio.create_task(queue.drain())
        await asyncio.sleep(0)
        queue.add("b")
        for _ in range(10):
            await asyncio.sleep(0)
        assert (drained.done(), worker.done(), turns) == (False, False, ["a"])
        may_end.set()
        async with asyncio.timeout(60):
            await drained
            await worker
        assert turns == ["a"]

    asyncio.run(run())


def test_an_empty_queue_drains_at_once():
    async def run():
        queue = WorkQueue()
        worker = asyncio.create_task(queue.work(None))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await queue.drain()
            await worker

    asyncio.run(run())


def test_as_many_reconciles_run_at_once_as_the_limit_allows():
    async def run():
        working, ends = [], []
        queue = WorkQueue(2)

        async def handle(key):
            working.append(key)
            ends.append(asyncio.Event())
            await ends[-1].wait()

        worker = asyncio.create_task(queue.work(handle))
        for key in "abc":
            queue.add(key)
        await until(lambda: working == ["a", "b"])
        for _ in range(10):
            await asyncio.sleep(0)
        assert (working, queue.depth) == (["a", "b"], 1)
        ends.pop(0).set()
        await until(lambda: working == ["a", "b", "c"])
        for end in ends:
            end.set()
        await until(lambda: is_at_rest(queue))
        await stop([worker])

    asyncio.run(run())


def test_an_event_of_a_failed_key_is_reconciled_soon_and_not_at_once(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.work_queue._FIRST_RETRY_S", 1000.0)
    monkeypatch.setattr("rayloom_operator.reconcile.work_queue._MAX_RETRY_S", 1000.0)

    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)
            raise ValueError

        worker = asyncio.create_task(queue.work(handle))
        now = asyncio.get_running_loop().time
        queue.add("a")
        await until(lambda: turns == ["a"] and not queue._working)
        assert queue._timers["a"].when() > now() + 900
        for _ in range(3):
            queue.add("a")
        assert 1 < queue._timers["a"].when() - now() <= 2
        assert (turns, queue.depth) == (["a"], 0)
        queue._failed_at["a"] -= 2
        queue.add("a")
        async with asyncio.timeout(60):
            while turns == ["a"]:
                await asyncio.sleep(0.001)
        await stop([worker])

    asyncio.run(run())


def test_a_queue_that_is_not_open_ignores_keys():
    async def run():
        queue = WorkQueue(is_open=False)
        queue.add("a")
        assert queue.depth == 0
        queue.open()
        queue.add("b")
        assert queue.depth == 1

    asyncio.run(run())


def test_a_successful_reconcile_replaces_earlier_requeues_and_a_failed_one_does_not():
    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)
            if key == "failing" and turns.count(key) == 2:
                raise RuntimeError("trouble")
            return {1: 0.3, 2: 60.0}.get(turns.count(key))

        worker = asyncio.create_task(queue.work(handle))
        for key in ("well", "failing"):
            queue.add(key)
        await until(lambda: len(turns) == 2)
        dues = {key: timer.when() for key, timer in queue._timers.items()}
        for key in ("well", "failing"):
            queue.add(key)
        await until(lambda: len(turns) == 4 and not queue._working)
        assert queue._timers["well"].when() > dues["well"] + 50
        assert queue._timers["failing"].when() == dues["failing"]
        await until(lambda: turns.count("failing") == 3)
        assert turns.count("well") == 2
        await stop([worker])

    asyncio.run(run())


def test_a_requeue_asked_for_during_a_reconcile_survives_its_end_though_an_earlier_one_was_pending():
    async def run():
        queue, version, begun, seen, may_end = WorkQueue(), [1], [], [], asyncio.Event()

        async def handle(key):
            read = version[0]
            begun.append(read)
            await may_end.wait()
            seen.append(read)
            return 300.0

        worker = asyncio.create_task(queue.work(handle))
        queue.add_after("a", 0.2)
        queue.add("a")
        await until(lambda: begun)
        version[0] = 2
        queue.add_after("a", 0.4)
        may_end.set()
        await until(lambda: seen == [1, 2] and is_at_rest(queue))
        # At the start of the second reconcile, the only pending requeue was the one that caused this reconcile.
        assert queue._timers["a"].when() - asyncio.get_running_loop().time() > 250
        await stop([worker])

    asyncio.run(run())
