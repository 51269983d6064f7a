"""The order of the queue: the key that is reconciled first. No key waits for ever."""

import asyncio

from queue_steps import stop, until
from rayloom_operator.reconcile.work_queue import WorkQueue


def order(prepare, num_turns, limit=1):
    """The first keys that are reconciled after `prepare(queue)`, and the priorities of their waits."""
    turns, waits = [], []

    async def run():
        queue = WorkQueue(limit, on_wait=lambda priority, seconds: waits.append((priority, seconds >= 0)))

        async def handle(key):
            turns.append(key)
            if key.startswith("endless"):
                queue.add(key)

        prepare(queue)
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: len(turns) >= num_turns)
        await stop([worker])

    asyncio.run(run())
    assert all(is_known for _, is_known in waits)
    return turns[:num_turns], [priority for priority, _ in waits][:num_turns]


def test_events_go_before_changed_specs_and_those_before_new_services_each_in_order_of_arrival():
    def prepare(queue):
        for key in "ab":
            queue.add(key, is_changed=True, is_new=True)
        for key in "cd":
            queue.add(key, is_changed=True)
        for key in "ef":
            queue.add(key)

    assert order(prepare, 6) == (list("efcdab"), ["news", "news", "known", "known", "new", "new"])


def test_services_that_are_listed_at_the_start_go_after_all_others():
    def prepare(queue):
        for key in "ab":
            queue.add(key, is_new=True)
        queue.add("c", is_changed=True)
        queue.add("d")

    assert order(prepare, 4) == (["d", "c", "a", "b"], ["news", "known", "new", "new"])


def test_a_waiting_service_goes_with_its_most_urgent_event_and_once():
    def prepare(queue):
        for key in "abc":
            queue.add(key, is_new=True)
        for key in "bbd":
            queue.add(key)
        queue.add("c", is_changed=True)
        for key in "bcd":
            queue.add(key, is_changed=True, is_new=True)

    assert order(prepare, 4) == (["b", "d", "c", "a"], ["news", "news", "known", "new"])


def test_a_regular_resync_goes_after_events_and_a_requeue_that_is_due_soon_does_not(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.work_queue.REGULAR_S", 0.02)

    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)

        queue.add_after("regular", 0.02)
        queue.add_after("soon", 0.019)
        async with asyncio.timeout(60):
            while queue.depth < 2:
                await asyncio.sleep(0.001)
        queue.add("new", is_new=True)
        queue.add("news")
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: len(turns) == 4)
        await stop([worker])
        assert turns == ["soon", "news", "regular", "new"]

    asyncio.run(run())


def test_while_events_never_end_known_services_get_one_reconcile_of_eight_and_new_ones_one_of_sixty_four():
    def prepare(queue):
        for key in ("endless-1", "endless-2"):
            queue.add(key)
        # Thousands of keys may have waited long, so the queue does not begin with the keys that have waited longest.
        for number in range(3):
            queue.add(f"new-{number}", is_new=True)
        for number in range(9):
            queue.add(f"known-{number}", is_changed=True)

    turns, waits = order(prepare, 128)
    others = {turn: turns[turn - 1] for turn in range(1, 129) if waits[turn - 1] != "news"}
    assert others == {
        **{8 * number: f"known-{number - 1}" for number in range(1, 8)},
        64: "new-0",
        72: "known-7",
        80: "known-8",
        128: "new-1",
    }


def test_an_edit_waits_for_events_alone_while_new_services_bring_more_events_than_there_are_reconciles():
    turns = []

    async def run():
        queue, left = WorkQueue(4), dict.fromkeys((f"new-{number}" for number in range(250)), 16)

        async def handle(key):
            turns.append(key)
            left[key] -= 1
            if left[key]:
                queue.add(key)
            if len(turns) == 1000:
                queue.add("edited", is_changed=True)

        left["edited"] = 1
        for number in range(250):
            queue.add(f"new-{number}", is_new=True)
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: len(turns) == 250 * 16 + 1)
        await stop([worker])

    asyncio.run(run())
    assert turns.index("edited") < 1000 + 8 + 4
    # After 1000 turns, all services that have begun are finished, except the last few.
    assert len(set(turns[:1000])) < 1000 / 16 + 30
