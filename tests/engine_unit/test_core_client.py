"""The front's record of its sequences, tested with the core's real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from pathlib import Path

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core_server.sockets import CoreIo, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence
from rt_server import wait_until


def _sequence(name: str) -> ClientSequence:
    return ClientSequence(
        sequence_id=name,
        request_id=name,
        lane=0,
        mailbox=Mailbox(),
        prompt_ids=(1, 2),
        params=DecodingParams(max_tokens=4),
        priority=0,
        arrival=0.0,
    )


def test_a_sequence_submitted_during_the_connection_reaches_the_core_once(tmp_path: Path) -> None:
    address, inbox = f"unix:{tmp_path}/core.sock", Inbox(deque(), threading.Event())
    io = CoreIo(address, "secret", inbox, CoreState(epoch=1, executor="uni").status)
    io.start()

    def connected() -> None:
        if client.is_connected:
            client.submit([_sequence("new")])
            client.abort("left")

    async def run() -> None:
        client.submit([_sequence("before"), _sequence("left")])
        task = asyncio.create_task(client.run())
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) >= 2, 10.0, lambda: str(inbox.items))
        task.cancel()

    client = CoreClient(
        {"core": CoreAddress(address, "secret")},
        on_status=lambda link, status: None,
        on_change=connected,
        on_recovery=lambda recovery: None,
    )
    asyncio.run(run())
    io.stop()
    got = [(type(message).__name__, getattr(message, "sequence_id", "")) for _, message in inbox.take()]
    # No core had the sequence "left", so the client sends no Abort for it.
    assert got[:2] == [("Submit", "new"), ("Submit", "before")]
    assert [name for kind, name in got if kind == "Submit"] == ["new", "before"]
