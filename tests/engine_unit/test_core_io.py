"""The core's side of the protocol: who is let in, what arrives, and that a front that leaves is noticed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core_io import CoreIo, Disconnected, Inbox
from rayloom_engine.core_state import CoreState
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.messages import Abort, CoreStatus, Hello, Output, Outputs, Submit, Welcome
from rt_server import wait_until

TOKEN = "secret"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/core.sock"


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(deque(), threading.Event())


@pytest.fixture
def io(address: str, inbox: Inbox) -> Iterator[CoreIo]:
    io = CoreIo(address, TOKEN, inbox, CoreState(epoch=7, executor="uni").status)
    io.start()
    yield io
    io.stop()


async def _greet(address: str, hello: Hello) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    writer.write(frame(hello))
    return reader, writer


@pytest.mark.parametrize(
    "hello",
    [Hello(token="wrong", front_id="f"), Hello(token=TOKEN, front_id="f", version=99)],
    ids=["wrong token", "other version"],
)
def test_a_stranger_is_shown_the_door(address: str, io: CoreIo, inbox: Inbox, hello: Hello) -> None:
    async def knock() -> bytes:
        reader, writer = await _greet(address, hello)
        answer = await reader.read()
        writer.close()
        return answer

    assert asyncio.run(knock()) == b""
    assert inbox.take() == []


def test_what_is_no_message_closes_only_that_connection(address: str, io: CoreIo, inbox: Inbox) -> None:
    async def babble() -> bytes:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        await read_frame(reader)
        writer.write(b"\x00\x00\x00\x02??")
        rest = await reader.read()
        writer.close()
        return rest

    asyncio.run(babble())
    wait_until(lambda: bool(inbox.items), 5.0, lambda: "no word of the lost front")
    assert [type(message) for _, message in inbox.take()] == [Disconnected]
    asyncio.run(babble())


def test_a_front_is_welcomed_heard_answered_and_missed(address: str, io: CoreIo, inbox: Inbox) -> None:
    submit = Submit(sequence_id="s", prompt_ids=(1, 2), params=DecodingParams(max_tokens=3), priority=2)

    async def talk() -> list[object]:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        got: list[object] = [core_decoder.decode(await read_frame(reader)) for _ in range(2)]
        writer.write(frame(submit) + frame(Abort("s")))
        await writer.drain()
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 2, 5.0, lambda: str(inbox.items))
        io.send(inbox.items[0][0], Outputs((Output(sequence_id="s", token_ids=(9,)),)))
        while not isinstance(got[-1], Outputs):
            got.append(core_decoder.decode(await read_frame(reader)))
        writer.close()
        return got

    welcome, status, *_, outputs = asyncio.run(talk())
    assert isinstance(welcome, Welcome)
    assert welcome.epoch == 7
    assert isinstance(status, CoreStatus)
    assert status.state == "starting"
    assert outputs == Outputs((Output(sequence_id="s", token_ids=(9,)),))
    wait_until(lambda: len(inbox.items) == 3, 5.0, lambda: str(inbox.items))
    (first, got_submit), (second, got_abort), (third, gone) = inbox.take()
    assert first == second == third
    assert (got_submit, got_abort) == (submit, Abort("s"))
    assert isinstance(gone, Disconnected)
    io.send(first, Outputs(()))  # nobody is there any more, and nothing breaks


def test_phases_follow_each_other_and_end() -> None:
    state = CoreState(epoch=1, executor="uni")
    state.begin_phase("load", 0, 10, "B")
    state.begin_phase("load", 4, 10, "B")
    assert [(p.name, p.done, p.is_finished) for p in state.phases] == [("load", 4, False)]
    state.begin_phase("warm_up", 0, 0, "")
    state.end_phase()
    assert [(p.name, p.done, p.is_finished) for p in state.phases] == [("load", 10, True), ("warm_up", 0, True)]
