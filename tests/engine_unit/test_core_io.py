"""The core's side of the protocol: accepted and refused fronts, their messages, and the end of their connections."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.core_server import sockets
from rayloom_engine.core_server.sockets import CoreIo, Disconnected, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.messages import (
    Abort,
    CoreStatus,
    Hello,
    Outputs,
    SequenceOutput,
    Submit,
    WantCache,
    WantStatus,
    Welcome,
)
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


def test_bytes_that_are_no_message_close_only_that_connection(address: str, io: CoreIo, inbox: Inbox) -> None:
    async def babble() -> bytes:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        await read_frame(reader)
        writer.write(b"\x00\x00\x00\x02??")
        rest = await reader.read()
        writer.close()
        return rest

    asyncio.run(babble())
    wait_until(lambda: bool(inbox.items), 30.0, lambda: "no word of the lost front")
    assert [type(message) for _, message in inbox.take()] == [Disconnected]
    asyncio.run(babble())


def test_a_front_gets_a_status_when_it_requests_one(
    address: str, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_STATUS_SECONDS", 1000.0)
    state = CoreState(epoch=7, executor="uni", state="serving")
    io = CoreIo(address, TOKEN, inbox, state.status)
    io.start()

    async def talk() -> list[int]:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        assert isinstance(core_decoder.decode(await read_frame(reader)), Welcome)
        running = []
        for number in (0, 3, 5):
            if number:
                state.stats = SchedulerStats(num_running=number)
                writer.write(frame(WantStatus()))
            async with asyncio.timeout(30.0):
                status = core_decoder.decode(await read_frame(reader))
            assert isinstance(status, CoreStatus)
            running.append(status.stats.num_running)
        writer.close()
        return running

    try:
        assert asyncio.run(talk()) == [0, 3, 5]
    finally:
        io.stop()
    assert [type(message) for _, message in inbox.take()] == [Disconnected]


def test_a_front_connects_submits_gets_outputs_and_disconnects(address: str, io: CoreIo, inbox: Inbox) -> None:
    submit = Submit(sequence_id="s", prompt_ids=(1, 2), params=DecodingParams(max_tokens=3), priority=2)

    async def talk() -> list[object]:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        got: list[object] = [core_decoder.decode(await read_frame(reader)) for _ in range(2)]
        writer.write(frame(submit) + frame(Abort("s")))
        await writer.drain()
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 2, 30.0, lambda: str(inbox.items))
        io.send(inbox.items[0][0], Outputs((SequenceOutput(sequence_id="s", token_ids=(9,)),)))
        while not isinstance(got[-1], Outputs):
            got.append(core_decoder.decode(await read_frame(reader)))
        writer.close()
        return got

    welcome, status, *_, outputs = asyncio.run(talk())
    assert isinstance(welcome, Welcome)
    assert welcome.epoch == 7
    assert isinstance(status, CoreStatus)
    assert status.state == "starting"
    assert outputs == Outputs((SequenceOutput(sequence_id="s", token_ids=(9,)),))
    wait_until(lambda: len(inbox.items) == 3, 30.0, lambda: str(inbox.items))
    (first, got_submit), (second, got_abort), (third, gone) = inbox.take()
    assert first == second == third
    assert (got_submit, got_abort) == (submit, Abort("s"))
    assert isinstance(gone, Disconnected)
    io.send(first, Outputs(()))  # the front has disconnected, and the core drops the message


def test_a_front_asks_for_the_cache_and_may_ask_again(address: str, io: CoreIo, inbox: Inbox) -> None:
    async def ask() -> None:
        _, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        writer.write(frame(WantCache()) * 2)
        async with asyncio.timeout(30.0):
            while len(inbox.items) < 2:
                await asyncio.sleep(0.01)
        writer.close()

    asyncio.run(ask())
    wait_until(lambda: any(isinstance(each, Disconnected) for _, each in inbox.items), 30.0, lambda: str(inbox.items))
    kinds = [type(message) for _, message in inbox.take()]
    assert kinds == [WantCache, WantCache, Disconnected]


def test_a_stranger_cannot_make_the_core_take_much(address: str, io: CoreIo) -> None:
    async def announce() -> bytes:
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write((64 * 1024 + 1).to_bytes(4, "big"))
        answer = await asyncio.wait_for(reader.read(), 3.0)  # the limit is less than the 5 s that a hello may take
        writer.close()
        return answer

    assert asyncio.run(announce()) == b""


def test_a_front_that_takes_nothing_is_closed(address: str, inbox: Inbox) -> None:
    io = CoreIo(address, TOKEN, inbox, CoreState(epoch=7, executor="uni").status, stall_seconds=0.5)
    io.start()

    async def connect() -> None:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        await read_frame(reader)
        io.send(1, Outputs((SequenceOutput(sequence_id="s" * 4 * 1024 * 1024, token_ids=(9,)),)))
        await asyncio.to_thread(wait_until, lambda: bool(inbox.items), 30.0, lambda: "the front is still there")
        writer.close()

    asyncio.run(connect())
    assert [(number, type(message)) for number, message in inbox.take()] == [(1, Disconnected)]
    io.stop()


def test_a_front_with_too_much_unsent_data_is_closed(
    monkeypatch: pytest.MonkeyPatch, address: str, io: CoreIo, inbox: Inbox
) -> None:
    monkeypatch.setattr("rayloom_engine.core_server.sockets._MOST_UNSENT_BYTES", 2**23)

    async def connect() -> None:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        await read_frame(reader)
        large = Outputs((SequenceOutput(sequence_id="s" * 2**22, token_ids=(9,)),))
        await asyncio.to_thread(io.send, 1, large)
        assert inbox.take() == []
        for _ in range(2):
            await asyncio.to_thread(io.send, 1, large)
        await asyncio.to_thread(wait_until, lambda: bool(inbox.items), 30.0, lambda: "the front is still there")
        writer.close()

    asyncio.run(connect())
    assert [(number, type(message)) for number, message in inbox.take()] == [(1, Disconnected)]


def test_the_main_thread_sends_without_the_io_thread(address: str, io: CoreIo, inbox: Inbox) -> None:
    """The I/O thread is blocked; outputs arrive all the same."""
    is_blocked = threading.Event()
    may_go_on = threading.Event()

    async def talk() -> list[object]:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        for _ in range(2):
            await read_frame(reader)
        io._loop.call_soon_threadsafe(lambda: (is_blocked.set(), may_go_on.wait(30.0)))
        await asyncio.to_thread(is_blocked.wait, 10.0)
        io.send(1, Outputs((SequenceOutput(sequence_id="s", token_ids=(9,)),)))
        got = [core_decoder.decode(await asyncio.wait_for(read_frame(reader), 10.0))]
        while not isinstance(got[-1], Outputs):  # a status may have come before the I/O thread was blocked
            got.append(core_decoder.decode(await asyncio.wait_for(read_frame(reader), 10.0)))
        may_go_on.set()
        writer.close()
        return got

    assert asyncio.run(talk())[-1] == Outputs((SequenceOutput(sequence_id="s", token_ids=(9,)),))


def test_a_quarter_of_a_million_positions_of_prompt_logprobs_arrive(address: str, io: CoreIo, inbox: Inbox) -> None:
    num_positions = 262_144
    entry = TokenLogprobs(123_456, -3.3, 17, tuple((100_000 + index, -1.25 * index) for index in range(20)))
    assert (
        num_positions * len(frame(Outputs((SequenceOutput(sequence_id="s", prompt_logprobs=(entry,)),)))) > 90_000_000
    )
    output = SequenceOutput(
        sequence_id="s", token_ids=(9,), prompt_logprobs=(entry,) * num_positions, finish_reason="stop"
    )

    async def ask() -> list[tuple[int, SequenceOutput]]:
        client = CoreClient(
            {"core": CoreAddress(address, TOKEN)},
            on_status=lambda link, status: None,
            on_change=lambda: None,
            on_recovery=lambda recovery: None,
        )
        mailbox = Mailbox()
        sequence = ClientSequence(
            sequence_id="s",
            request_id="r",
            lane=0,
            mailbox=mailbox,
            prompt_ids=(1, 2),
            params=DecodingParams(max_tokens=1, prompt_logprobs=20),
            priority=0,
            arrival=0.0,
        )
        client.submit([sequence])
        task = asyncio.create_task(client.run())
        await asyncio.to_thread(wait_until, lambda: bool(inbox.items), 10.0, lambda: "no request came")
        await asyncio.to_thread(io.send, inbox.items[0][0], Outputs((output,)))
        got = await mailbox.take(100.0)
        task.cancel()
        return got

    [(_, got)] = asyncio.run(ask())
    assert len(got.prompt_logprobs) == num_positions
    assert got.prompt_logprobs[0] == got.prompt_logprobs[-1] == entry
    assert (got.token_ids, got.finish_reason) == ((9,), "stop")
    assert [type(message) for _, message in inbox.take()][:1] == [Submit]


def test_phases_follow_each_other_and_end() -> None:
    state = CoreState(epoch=1, executor="uni")
    state.begin_phase("load", 0, 10, "B")
    state.begin_phase("load", 4, 10, "B")
    assert [(p.name, p.done, p.is_finished) for p in state.phases] == [("load", 4, False)]
    state.begin_phase("warm_up", 0, 0, "")
    state.end_phase()
    assert [(p.name, p.done, p.is_finished) for p in state.phases] == [("load", 10, True), ("warm_up", 0, True)]


def test_work_is_reported_while_a_step_is_computed() -> None:
    state = CoreState(epoch=1, executor="uni", quiet_s=3.0)
    assert state.status().last_work_age_s is None
    state.rank_phase = "step"
    assert state.status().last_work_age_s == 3.0
