"""Mailbox: outputs go to the waiting task or to its reader, and the wait ends in time. test_front_*.py test streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from rayloom_engine.front.core_link.request_mailbox import DueReaders, Items, Mailbox, Outbox
from rayloom_engine.protocol.messages import SequenceOutput


def output(token_id: int) -> SequenceOutput:
    return SequenceOutput(sequence_id="s", token_ids=(token_id,))


def ids(items: Items) -> list[int]:
    return [token_id for _, each in items for token_id in each.token_ids]


class ReadMailbox:
    """A mailbox with a task in `take` and a reader. The reader accepts all outputs until `is_open` is False."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.mailbox = Mailbox()
        self.is_open = True
        self.read: list[list[int]] = []
        self.task = asyncio.ensure_future(self.mailbox.take(timeout_s, self._reader))
        self._due = DueReaders()

    def _reader(self, items: Items, _outbox: Outbox, _now_s: float) -> bool:
        if self.is_open:
            self.read.append(ids(items))
        return self.is_open

    def put(self, token_id: int) -> None:
        if self.mailbox.put(0, output(token_id)):
            self._due.add([], [self.mailbox])


async def turns(number: int = 4) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_outputs_that_arrive_together_are_read_in_one_call_and_the_task_sleeps_on() -> None:
    async def work() -> None:
        box = ReadMailbox()
        await turns()
        box.put(1)
        box.put(2)
        assert box.read == []  # the reader runs later, in a callback, and does not interrupt the caller
        await turns()
        box.put(3)
        await turns()
        assert box.read == [[1, 2], [3]]
        assert not box.task.done()
        box.task.cancel()

    run(work())


def test_outputs_that_the_reader_refuses_go_to_the_task_with_those_after_them() -> None:
    async def work() -> None:
        box = ReadMailbox()
        await turns()
        box.put(1)
        await turns()
        box.is_open = False
        box.put(2)
        await turns(1)
        box.put(3)
        assert ids(await box.task) == [2, 3]
        assert box.read == [[1]]

    run(work())


def test_between_some_streams_and_the_next_the_loop_does_other_work_and_new_answers_come_first() -> None:
    async def work() -> None:
        order: list[str] = []
        due = DueReaders()

        def boxes(name: str, number: int) -> list[Mailbox]:
            made = [Mailbox() for _ in range(number)]
            for mailbox in made:
                tasks.append(asyncio.ensure_future(mailbox.take(60.0, lambda *_: order.append(name) is None)))
            return made

        def put(mailboxes: list[Mailbox]) -> list[Mailbox]:
            return [mailbox for mailbox in mailboxes if mailbox.put(0, output(1))]

        tasks: list[asyncio.Task[Items]] = []
        running, new = boxes("running", 40), boxes("new", 2)
        await turns()
        due.add([], put(running))
        asyncio.get_running_loop().call_soon(order.append, "a request")
        await turns(1)
        assert order == ["running"] * 16 + ["a request"]
        due.add(put(new), [])
        await turns(1)
        assert order[17:] == ["new"] * 2 + ["running"] * 14
        await turns(1)
        assert order[33:] == ["running"] * 10
        due.add([], put(running))
        await turns(3)
        assert order[43:] == ["running"] * 40, "later outputs are read as well"
        for task in tasks:
            task.cancel()

    run(work())


def test_a_failure_comes_after_the_outputs_before_it() -> None:
    async def work() -> None:
        box = ReadMailbox()
        await turns()
        box.put(1)
        box.mailbox.fail(KeyError("gone"))
        assert ids(await box.task) == [1]
        with pytest.raises(KeyError, match="gone"):
            await box.mailbox.take(60.0)

    run(work())


def test_an_error_of_the_reader_ends_the_request_without_its_outputs_which_a_client_may_have() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        due = DueReaders()

        sent: list[int] = []

        def broken(items: Items, _outbox: Outbox, _now_s: float) -> bool:
            sent.extend(ids(items))
            raise ZeroDivisionError("reader")

        task = asyncio.ensure_future(mailbox.take(60.0, broken))
        await turns()
        if mailbox.put(0, output(1)):
            due.add([], [mailbox])
        await turns(1)
        assert not mailbox.put(0, output(2)), "after the error, and before the task runs"
        with pytest.raises(ZeroDivisionError, match="reader"):
            await task
        assert sent == [1]
        with pytest.raises(ZeroDivisionError, match="reader"):
            await mailbox.take(60.0)

    run(work())


def test_the_parts_of_several_streams_are_written_after_all_are_made_and_a_broken_one_fails_alone() -> None:
    """Bytes are made for all streams of a callback before any is written, which costs less than to alternate."""

    async def work() -> None:
        order: list[str] = []
        due = DueReaders()
        mailboxes = {name: Mailbox() for name in ("one", "broken", "three")}

        def write(part: bytes) -> None:
            order.append(f"written {part.decode()}")
            if part == b"broken":
                raise OSError("connection")

        def take(name: str, mailbox: Mailbox) -> asyncio.Task[Items]:
            def read(items: Items, outbox: Outbox, _now_s: float) -> bool:
                order.append(f"made {name}")
                outbox.append((mailbox, write, name.encode()))
                return True

            return asyncio.ensure_future(mailbox.take(60.0, read))

        tasks = {name: take(name, mailbox) for name, mailbox in mailboxes.items()}
        await turns()
        due.add([], [mailbox for mailbox in mailboxes.values() if mailbox.put(0, output(1))])
        await turns(1)
        assert order == ["made one", "made broken", "made three", "written one", "written broken", "written three"]
        with pytest.raises(OSError, match="connection"):
            await tasks.pop("broken")
        assert not any(task.done() for task in tasks.values())
        assert not any(mailboxes[name].failure for name in tasks)
        for task in tasks.values():
            task.cancel()

    run(work())


def test_what_the_reader_takes_begins_the_wait_again() -> None:
    """A stream sends a comment if no token has arrived for some time. Each token restarts this time."""

    async def work() -> None:
        box = ReadMailbox()
        await turns()
        began_s = time.monotonic()
        assert box.mailbox.idle_s(began_s + 50.0) >= 50.0
        box.put(1)
        assert box.mailbox.idle_s(began_s + 50.0) == 0.0  # the output has arrived, and the next callback reads it
        await turns()
        assert box.mailbox.idle_s(began_s + 50.0) <= 50.0
        box.task.cancel()

    run(work())


def test_a_wait_in_which_nothing_arrives_ends_after_its_time() -> None:
    async def work() -> None:
        assert await ReadMailbox(timeout_s=0.01).task == []

    run(work())


def test_without_a_reader_the_task_is_woken() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        task = asyncio.ensure_future(mailbox.take(60.0))
        await turns()
        assert not mailbox.put(0, output(1))
        assert ids(await task) == [1]
        assert await mailbox.take(0.0) == []

    run(work())
