"""CoreIo: the EngineCore's sockets for API server processes ("fronts"), and the I/O thread with its own event loop.

The I/O thread accepts fronts and reads their messages. The main thread and the I/O thread both send (front_socket.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rayloom_engine.common.rare_lines import OncePerProblem
from rayloom_engine.core_server.front_handshake import FrontRefused, Greeted, PortTls, greet_local, greet_remote
from rayloom_engine.core_server.front_socket import FrontSocket
from rayloom_engine.core_server.ranks.strangers import Strangers
from rayloom_engine.protocol.channel import limit_tcp
from rayloom_engine.protocol.framing import frame, front_decoder, read_frame
from rayloom_engine.protocol.logprob_parts import split_outputs
from rayloom_engine.protocol.messages import (
    Abort,
    CoreMessage,
    CoreStatus,
    Draining,
    EngineAdapters,
    FetchFile,
    FrontMessage,
    Hello,
    NeedAdapters,
    Outputs,
    StartTls,
    Submit,
    SubmitChoices,
    WantCache,
    WantStatus,
)
from rayloom_engine.protocol.text_files import read_part

logger = logging.getLogger(__name__)

_START_STATUS_SECONDS = 0.1  # seconds between two statuses during a start, so that progress bars move
_STATUS_SECONDS = 1.0
_STALL_SECONDS = 30.0  # seconds within which a front must read a small message, see unsent.py
# The most unsent bytes for a front. A front with more unsent bytes is disconnected at once, because the ranks need the
# machine's memory. A front that reads has far fewer unsent bytes.
_MOST_UNSENT_BYTES = 2**30


class GatewayConnected:
    """Inbox entry: the connection's peer is a gateway. This entry comes before all messages of the connection."""


class Disconnected:
    """Inbox entry: the connection of a front has ended. All of its sequences are dropped."""


FrontReport = Draining | EngineAdapters | NeedAdapters  # messages that only the engine's own front sends
InboxMessage = Submit | Abort | WantCache | GatewayConnected | Disconnected


@dataclass(frozen=True, slots=True)
class Inbox:
    """Messages of fronts in order of arrival. The I/O thread adds them, and the main thread removes them."""

    items: deque[tuple[int, InboxMessage]]
    event: threading.Event

    def put(self, connection: int, message: InboxMessage) -> None:
        self.items.append((connection, message))
        self.event.set()

    def take(self) -> list[tuple[int, InboxMessage]]:
        """Removes all entries from the inbox and returns them."""
        self.event.clear()
        taken = []
        while self.items:
            taken.append(self.items.popleft())
        return taken

    def wait(self, seconds: float, at_most: float) -> bool:
        """Waits for an entry, at most the shorter of both times. Returns True as soon as there is one, else False."""
        return self.event.wait(min(seconds, at_most))


@dataclass(frozen=True, slots=True)
class _Front:
    """A connected front."""

    socket: FrontSocket
    transport: asyncio.WriteTransport
    is_drained: asyncio.Event  # set while the front has no unsent bytes; used by the I/O thread alone


@dataclass(frozen=True, slots=True)
class GatewayPort:
    """The listening socket for gateways, and the key without which a gateway is refused. Without `tls`: clear text."""

    listener: socket.socket
    key: str
    tls: PortTls | None = None


class CoreIo:
    """Accepts fronts, puts their messages into the inbox, and sends the main thread's messages and a status to them.

    The status is sent every second, and more often during the start.
    """

    def __init__(
        self,
        address: str,
        token: str,
        inbox: Inbox,
        status: Callable[[], CoreStatus],
        stall_seconds: float = _STALL_SECONDS,
        gateways: GatewayPort | None = None,
        on_front_report: Callable[[FrontReport], None] = lambda message: None,
    ) -> None:
        """`stall_seconds`: a front that does not read a small message within this time is disconnected.

        `gateways`: a second port at which fronts are accepted; None: fronts are accepted at `address` alone.
        `on_front_report`: called with each report of the engine's own front. If a report is for gateways, the next
        status must contain it.
        """
        self._address = address
        self._token = token
        self._inbox = inbox
        self._status = status
        self._stall_seconds = stall_seconds
        self._gateways = gateways
        self._on_front_report = on_front_report
        self._strangers = Strangers()
        self._loop = asyncio.new_event_loop()
        self._fronts: dict[int, _Front] = {}
        self._next_connection = 1
        self._problems = OncePerProblem()
        self._listening = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="core-io", daemon=True)

    def start(self) -> None:
        """Starts the thread and returns once it listens. If it cannot listen, the thread ends the process."""
        self._thread.start()
        self._listening.wait()

    def send(self, connection: int, message: CoreMessage) -> None:
        """Sends a message, or drops it if the front is gone. For the main thread, which never waits for a front.

        If the front's socket does not accept all bytes at once, the I/O thread sends the rest.
        """
        front = self._fronts.get(connection)
        if front is None:
            return
        for part in split_outputs(message) if isinstance(message, Outputs) else [message]:
            if self._write(connection, front, frame(part)):
                self._loop.call_soon_threadsafe(self._watch, connection)

    def stop(self) -> None:
        """Closes every socket and returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def flush_status(self) -> None:
        """Sends a status now. Returns once the sockets have accepted it, or after 2 s."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._flush_status(), self._loop).result(timeout=2.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException:
            # Without sockets this process is useless. The supervisor will start another core.
            logger.exception("the core cannot listen at %s", self._address)
            os._exit(1)

    async def _serve(self) -> None:
        path = Path(self._address.removeprefix("unix:"))
        path.unlink(missing_ok=True)
        servers = [await asyncio.start_unix_server(self._accept_local, path=path)]
        path.chmod(0o600)
        if self._gateways is not None:
            servers.append(await asyncio.start_server(self._accept_remote, sock=self._gateways.listener))
        self._listening.set()
        while not self._stopping.is_set():
            status = self._status()
            self._broadcast(status)
            self._drop_stalled()
            pause = _START_STATUS_SECONDS if status.state == "starting" else _STATUS_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        for server in servers:
            server.close()
        for front in self._fronts.values():
            front.transport.abort()
        # Lets the event loop run twice, so that the readers notice the end of their connections and close the sockets.
        for _ in range(2):
            await asyncio.sleep(0)

    async def _accept_local(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = greet_local(reader, self._token, self._status().epoch)
        await self._converse(reader, writer, greeting, is_own=True)

    async def _accept_remote(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._gateways is not None
        connection = writer.get_extra_info("socket")
        limit_tcp(connection)
        self._strangers.admit(connection, str(writer.get_extra_info("peername")[0]))

        async def greet() -> Greeted:
            assert self._gateways is not None
            port = self._gateways
            try:
                return await greet_remote(reader, writer, port.key, port.tls, self._status().epoch)
            finally:
                self._strangers.release(connection)

        await self._converse(reader, writer, greet(), is_own=False)

    async def _converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: Coroutine[Any, Any, Greeted],
        *,
        is_own: bool,
    ) -> None:
        """Receives a front's messages until its connection ends. `greeting` returns the answer to the front's Hello.

        `is_own`: the front belongs to this engine.
        """
        connection = self._next_connection
        self._next_connection += 1
        try:
            greeted = await greeting
            self._problems.solved()
            self._welcome(connection, writer, greeted)
            source = greeted.stream or reader
            if not is_own:
                self._inbox.put(connection, GatewayConnected())
            while True:
                message = front_decoder.decode(await read_frame(source))
                if is_own and isinstance(message, FrontReport):
                    self._on_front_report(message)
                    self._broadcast(self._status())
                elif is_own and isinstance(message, WantStatus):
                    self._answer(connection, self._status())
                else:
                    self._receive(connection, message)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the front is gone; its sequences are dropped below
        except FrontRefused as refusal:
            self._warn_once(str(refusal))
        except (msgspec.DecodeError, ValueError) as error:
            self._warn_once(f"a connection sent an invalid message: {error}")
        finally:
            front = self._fronts.pop(connection, None)
            if front is not None:
                self._inbox.put(connection, Disconnected())
                self._loop.remove_writer(front.socket)
                front.socket.close()
            writer.close()

    def _receive(self, connection: int, message: FrontMessage) -> None:
        match message:
            case SubmitChoices():
                for submit in message.with_prompt():
                    self._inbox.put(connection, submit)
            case Submit() | Abort() | WantCache():
                self._inbox.put(connection, message)
            case FetchFile():
                self._answer(connection, read_part(self._status().model, message))
            case Hello() | StartTls() | Draining() | EngineAdapters() | NeedAdapters() | WantStatus():
                raise ValueError(f"an unexpected {type(message).__name__}")

    def _answer(self, connection: int, message: CoreMessage) -> None:
        """Sends a message like `send`, for the I/O thread."""
        front = self._fronts.get(connection)
        if front is not None:
            self._send_bytes(connection, front, frame(message))

    def _send_bytes(self, connection: int, front: _Front, data: bytes) -> None:
        """Sends the bytes of messages, for the I/O thread."""
        if self._write(connection, front, data):
            self._watch(connection)

    def _welcome(self, connection: int, writer: asyncio.StreamWriter, greeted: Greeted) -> None:
        """Accepts a front: sends it Welcome and a status, and registers it for all later messages."""
        # The transport only reads. The main thread sends messages, too, but only the I/O thread may use the transport.
        # So all messages are written to a duplicate of the transport's socket.
        stream = greeted.stream
        tls = None if stream is None else stream.session
        sending = FrontSocket(writer.get_extra_info("socket").dup(), self._stall_seconds, tls)
        front = _Front(sending, writer.transport, asyncio.Event())
        front.is_drained.set()
        self._fronts[connection] = front
        if stream is not None:
            stream.send_with(partial(self._send_bytes, connection, front))
        self._send_bytes(connection, front, frame(greeted.welcome) + frame(self._status()))

    def _warn_once(self, problem: str) -> None:
        # A refused front reconnects four times a second without end, so an equal warning is logged only once.
        if self._problems.is_new(problem):
            logger.warning("%s; repetitions are not logged until a front is accepted", problem)

    def _write(self, connection: int, front: _Front, data: bytes) -> bool:
        """Sends a message. Returns True if the I/O thread must begin to watch the connection."""
        must_watch = front.socket.send(data, time.monotonic())
        if front.socket.num_unsent > _MOST_UNSENT_BYTES:
            logger.warning("connection %d has %d bytes unread; closed", connection, front.socket.num_unsent)
            front.socket.abort()
        return must_watch

    def _watch(self, connection: int) -> None:
        """Sends the unsent bytes of a connection as soon as its socket has room."""
        front = self._fronts.get(connection)
        if front is not None:
            front.is_drained.clear()
            self._loop.add_writer(front.socket, self._flush, front)

    def _flush(self, front: _Front) -> None:
        if front.socket.flush():
            self._loop.remove_writer(front.socket)
            front.is_drained.set()

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for connection, front in self._fronts.items():
            if front.socket.has_stalled(now):
                logger.warning("connection %d reads its messages too slowly; closed", connection)
                front.socket.abort()

    def _broadcast(self, status: CoreStatus) -> None:
        data = frame(status)
        for connection, front in list(self._fronts.items()):
            self._send_bytes(connection, front, data)

    async def _flush_status(self) -> None:
        self._broadcast(self._status())
        for front in list(self._fronts.values()):
            with contextlib.suppress(TimeoutError):  # a front that reads slowly delays the caller by at most 1 s
                await asyncio.wait_for(front.is_drained.wait(), 1.0)
