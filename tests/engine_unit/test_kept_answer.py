"""Every reader of a kept answer gets all bytes. Another answer waits for its readers, and ends without them."""

from __future__ import annotations

import asyncio
from typing import Any

from rayloom_engine.front.http.body_budget import BodyBudget, HeldBody
from rayloom_engine.front.idempotency.kept_answer import MOST_UNREAD_BYTES, KeptAnswer

START = {"type": "http.response.start", "status": 200, "headers": []}


def part(body: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def answer() -> KeptAnswer:
    return KeptAnswer(HeldBody(b"{}", BodyBudget(1000).share("", 0)), lambda num_bytes: None)


def test_a_late_reader_begins_at_the_first_byte() -> None:
    async def story() -> None:
        kept = answer()
        early, late = asyncio.Event(), asyncio.Event()
        kept.join(early)
        await kept.send(START)
        await kept.send(part(b"one "))
        assert kept.take(early, 100) == b"one "
        await kept.send(part(b"two", is_last=True))
        kept.join(late)
        assert [kept.take(late, 5), kept.take(late, 5), kept.take(late, 5)] == [b"one t", b"wo", b""]
        assert kept.take(early, 100) == b"two"
        kept.finish()
        assert kept.is_good

    asyncio.run(story())


def test_the_handler_sees_a_broken_connection_only_when_nobody_reads_an_answer_that_is_not_kept() -> None:
    async def story() -> None:
        kept = answer()
        reader = asyncio.Event()
        kept.join(reader)
        assert await kept.receive() == {"type": "http.request", "body": b"{}", "more_body": False}
        watching = asyncio.create_task(kept.receive())
        kept.leave(reader)
        kept.join(reader)
        kept.stop_keeping()
        await asyncio.sleep(0)
        assert not watching.done()
        kept.leave(reader)
        assert (await watching)["type"] == "http.disconnect"

    asyncio.run(story())


def test_an_answer_that_is_not_kept_waits_for_its_slowest_reader() -> None:
    async def story() -> None:
        kept = answer()
        slow, fast = asyncio.Event(), asyncio.Event()
        kept.join(slow)
        kept.join(fast)
        whole = bytes(range(256)) * (2 * MOST_UNREAD_BYTES // 256)
        await kept.send(part(whole))  # a kept answer never waits for readers
        kept.stop_keeping()
        sending = asyncio.create_task(kept.send(part(b"more")))
        assert kept.take(fast, 10 * MOST_UNREAD_BYTES) == whole
        await asyncio.sleep(0)
        assert not sending.done()
        seen = kept.take(slow, MOST_UNREAD_BYTES + 4)
        await sending
        seen += kept.take(slow, 10 * MOST_UNREAD_BYTES)
        assert seen == whole + b"more"
        assert len(kept._bytes) == 4, "only what the fast reader has not read is left"

    asyncio.run(story())


def test_a_failed_or_refused_answer_is_not_good() -> None:
    async def story() -> None:
        cut, refused, failed = answer(), answer(), answer()
        for kept, status in ((cut, 200), (refused, 429), (failed, 200)):
            await kept.send({**START, "status": status})
            await kept.send(part(b"text", is_last=kept is not cut))
        failed.computation = type("Failed", (), {"has_failed": True})()
        assert [cut.is_good, refused.is_good, failed.is_good] == [False, False, False]

    asyncio.run(story())
