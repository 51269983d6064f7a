"""The queue: who goes first, and that nobody waits for ever."""

import asyncio

from queue_steps import stop, until
from rayloom_operator.work_queue import WorkQueue


def order(prepare, num_turns, limit=1):
    """The first keys that get their turn after `prepare(queue)`, and what their waits were told as."""
    turns, waits = [], []

    async def run():
        queue = WorkQueue(lambda: limit, on_wait=lambda priority, seconds: waits.append((priority, seconds >= 0)))

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


def test_news_go_before_new_specs_and_each_in_the_order_in_which_they_came():
    def prepare(queue):
        for key in "ab":
            queue.add(key, is_new=True)
        for key in "cd":
            queue.add(key)

    assert order(prepare, 4) == (["c", "d", "a", "b"], ["news", "news", "rest", "rest"])


def test_services_that_are_found_at_the_start_let_news_pass():
    def prepare(queue):
        queue.open(["a", "b"])
        queue.add("c")

    assert order(prepare, 3) == (["c", "a", "b"], ["news", "rest", "rest"])


def test_a_new_spec_whose_engine_has_news_goes_with_those_and_once():
    def prepare(queue):
        for key in "abc":
            queue.add(key, is_new=True)
        for key in "bbd":
            queue.add(key)
        queue.add("b", is_new=True)

    assert order(prepare, 4) == (["b", "d", "a", "c"], ["news", "news", "rest", "rest"])


def test_a_regular_look_lets_news_pass_and_one_that_is_due_soon_does_not(monkeypatch):
    monkeypatch.setattr("rayloom_operator.work_queue._REGULAR_S", 0.02)

    async def run():
        queue, turns = WorkQueue(), []

        async def handle(key):
            turns.append(key)

        queue.add_after("regular", 0.02)
        queue.add_after("soon", 0.019)
        async with asyncio.timeout(10):
            while queue.depth < 2:
                await asyncio.sleep(0.001)
        queue.add("news")
        worker = asyncio.create_task(queue.work(handle))
        await until(lambda: len(turns) == 3)
        await stop([worker])
        assert turns == ["soon", "news", "regular"]

    asyncio.run(run())


def test_while_news_never_end_one_turn_of_eight_is_another_s():
    def prepare(queue):
        for key in ("endless-1", "endless-2"):
            queue.add(key)
        for key in "ab":
            queue.add(key, is_new=True)

    _, waits = order(prepare, 16)
    assert waits == [*["news"] * 7, "rest"] * 2
