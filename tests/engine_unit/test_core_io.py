"""The core's side of the protocol: accepted and refused fronts, their messages, and the end of their connections."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.core_server.sockets import CoreIo, Disconnected, Inbox, _Front
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.front.core_link.core_client import ClientSequence, CoreAddress, CoreClient
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.messages import Abort, CoreStatus, Hello, Outputs, SequenceOutput, Submit, Welcome
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
    wait_until(lambda: bool(inbox.items), 5.0, lambda: "no word of the lost front")
    assert [type(message) for _, message in inbox.take()] == [Disconnected]
    asyncio.run(babble())


def test_a_front_connects_submits_gets_outputs_and_disconnects(address: str, io: CoreIo, inbox: Inbox) -> None:
    submit = Submit(sequence_id="s", prompt_ids=(1, 2), params=DecodingParams(max_tokens=3), priority=2)

    async def talk() -> list[object]:
        reader, writer = await _greet(address, Hello(token=TOKEN, front_id="f"))
        got: list[object] = [core_decoder.decode(await read_frame(reader)) for _ in range(2)]
        writer.write(frame(submit) + frame(Abort("s")))
        await writer.drain()
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 2, 5.0, lambda: str(inbox.items))
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
    wait_until(lambda: len(inbox.items) == 3, 5.0, lambda: str(inbox.items))
    (first, got_submit), (second, got_abort), (third, gone) = inbox.take()
    assert first == second == third
    assert (got_submit, got_abort) == (submit, Abort("s"))
    assert isinstance(gone, Disconnected)
    io.send(first, Outputs(()))  # the front is gone, and nothing breaks


def test_a_stranger_cannot_make_the_core_take_much(address: str, io: CoreIo) -> None:
    async def announce() -> bytes:
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write((64 * 1024 + 1).to_bytes(4, "big"))
        answer = await asyncio.wait_for(reader.read(), 3.0)  # at once, and not after the 5 s that a hello may take
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


class _Transport:
    num_unsent = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class _Writer:
    def __init__(self) -> None:
        self.transport = _Transport()

    def write(self, data: bytes) -> None:
        self.transport.num_unsent += len(data)


def _front() -> tuple[_Front, _Transport]:
    writer = _Writer()
    return _Front(writer, stall_seconds=30.0), writer.transport  # type: ignore[arg-type]


def test_the_oldest_unsent_message_is_judged_and_a_byte_now_and_then_is_no_excuse() -> None:
    front, transport = _front()
    assert not front.has_stalled(100.0)
    front.write(bytes(1024), 100.0)  # due at 130.001
    front.write(bytes(1024), 120.0)
    for now in (129.0, 130.0):
        transport.num_unsent -= 1
        assert not front.has_stalled(now)
    assert front.has_stalled(130.1)
    transport.num_unsent = 1024
    assert not front.has_stalled(130.1), "the first message is taken, the second is due at 150.002"
    assert front.has_stalled(150.1)
    transport.num_unsent = 0
    assert not front.has_stalled(150.1)


def test_a_front_that_reads_a_large_answer_steadily_stays() -> None:
    front, transport = _front()
    megabyte = 2**20
    for _ in range(90):
        front.write(bytes(megabyte), 0.0)
    for second in range(60):
        assert not front.has_stalled(float(second))
        transport.num_unsent -= megabyte
    # It stops there: the 61st message was due after 30 s and 61 s.
    assert not front.has_stalled(91.0)
    assert front.has_stalled(91.1)


def test_a_front_with_too_much_unsent_data_is_closed(monkeypatch: pytest.MonkeyPatch, inbox: Inbox) -> None:
    monkeypatch.setattr("rayloom_engine.core_server.sockets._MOST_UNSENT_BYTES", 1000)
    io = CoreIo("unix:unused", TOKEN, inbox, CoreState(epoch=7, executor="uni").status)
    front, transport = _front()
    io._fronts[1] = front
    io._write(1, bytes(1000))
    assert not transport.is_aborted
    io._write(1, bytes(1))
    assert transport.is_aborted
    io._write(1, bytes(1))
    assert transport.num_unsent == 1001, "nothing is written to a connection that closes"


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
            CoreAddress(address, TOKEN),
            on_status=lambda status: None,
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
