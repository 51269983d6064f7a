"""CoreIo: the EngineCore's sockets for API server processes ("fronts"), in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rayloom_engine.common.rare_lines import OncePerProblem
from rayloom_engine.protocol.framing import MAX_HELLO_BYTES, frame, front_decoder, read_frame
from rayloom_engine.protocol.logprob_parts import split_outputs
from rayloom_engine.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    CoreMessage,
    CoreStatus,
    Hello,
    Outputs,
    Submit,
    SubmitChoices,
    Welcome,
)

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 5.0
_START_STATUS_SECONDS = 0.1  # while starting, so that progress bars move
_STATUS_SECONDS = 1.0
# A front is disconnected if it does not read a message within _STALL_SECONDS, plus the time that all unsent bytes take
# at _LEAST_RATE.
_STALL_SECONDS = 30.0
_LEAST_RATE = 2**20  # bytes per second
# If more bytes than this wait to be sent to a front, the front is disconnected at once, because the machine's memory is
# for the ranks. Far fewer wait for a front that reads.
_MOST_UNSENT_BYTES = 2**30


class Disconnected:
    """Inbox entry: the connection of a front has ended. All of its sequences are dropped."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Messages of fronts in order of arrival. The I/O thread puts them in, the main thread takes them out."""

    items: deque[tuple[int, Submit | Abort | Disconnected]]
    event: threading.Event

    def put(self, connection: int, message: Submit | Abort | Disconnected) -> None:
        self.items.append((connection, message))
        self.event.set()

    def take(self) -> list[tuple[int, Submit | Abort | Disconnected]]:
        """Removes all entries from the inbox and returns them."""
        self.event.clear()
        taken = []
        while self.items:
            taken.append(self.items.popleft())
        return taken

    def wait(self, seconds: float, at_most: float) -> bool:
        """Waits for an entry. Returns True as soon as there is one, False after the shorter of the two times."""
        return self.event.wait(min(seconds, at_most))


class _Front:
    """A connected front, with the due times of its unsent messages."""

    def __init__(self, writer: asyncio.StreamWriter, stall_seconds: float) -> None:
        self.writer = writer
        self._stall_seconds = stall_seconds
        self._num_written = 0
        self._due: deque[tuple[int, float]] = deque()  # (bytes written with a message, due time) of unsent messages

    @property
    def num_unsent(self) -> int:
        """Bytes written that the operating system has not accepted yet, because the front reads slowly."""
        return self.writer.transport.get_write_buffer_size()

    def write(self, data: bytes, now: float) -> None:
        """Sends a message. If it cannot be sent at once, notes by when it must be read: see _STALL_SECONDS.

        All unsent bytes count, so that a large answer gets the time that a slow but steady reader needs.
        """
        self.writer.write(data)
        self._num_written += len(data)
        if self.num_unsent:
            self._due.append((self._num_written, now + self._stall_seconds + self.num_unsent / _LEAST_RATE))

    def has_stalled(self, now: float) -> bool:
        """True if the oldest unsent message is overdue. Reading a byte now and then does not defer the due time."""
        num_taken = self._num_written - self.num_unsent
        while self._due and self._due[0][0] <= num_taken:
            self._due.popleft()
        return bool(self._due) and now > self._due[0][1]


class CoreIo:
    """Accepts fronts, puts their messages into the inbox, and sends them the main thread's messages and a status.

    The status is sent every second, and more often during the start.
    """

    def __init__(
        self,
        address: str,
        token: str,
        inbox: Inbox,
        status: Callable[[], CoreStatus],
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        """`stall_seconds`: a front that does not read a small message within this time is disconnected."""
        self._address = address
        self._token = token
        self._inbox = inbox
        self._status = status
        self._stall_seconds = stall_seconds
        self._loop = asyncio.new_event_loop()
        self._fronts: dict[int, _Front] = {}
        self._next_connection = 1
        self._problems = OncePerProblem()
        self._listening = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="core-io", daemon=True)

    def start(self) -> None:
        """Starts the thread and returns once it listens. If it cannot, it logs the error and the process exits."""
        self._thread.start()
        self._listening.wait()

    def send(self, connection: int, message: CoreMessage) -> None:
        """Passes a message to the I/O thread, which sends it, or drops it if the front is gone.

        The main thread calls this.
        """
        for part in split_outputs(message) if isinstance(message, Outputs) else [message]:
            self._loop.call_soon_threadsafe(self._write, connection, frame(part))

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
            # Without sockets this process is useless. The supervisor will start another one.
            logger.exception("the core cannot listen at %s", self._address)
            os._exit(1)

    async def _serve(self) -> None:
        kind, _, where = self._address.partition(":")
        if kind == "unix":
            Path(where).unlink(missing_ok=True)
            server = await asyncio.start_unix_server(self._accept, path=where)
            Path(where).chmod(0o600)
        else:
            host, _, port = where.rpartition(":")
            server = await asyncio.start_server(self._accept, host=host, port=int(port))
        self._listening.set()
        while not self._stopping.is_set():
            status = self._status()
            self._broadcast(status)
            self._drop_stalled()
            pause = _START_STATUS_SECONDS if status.state == "starting" else _STATUS_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        server.close()
        for front in self._fronts.values():
            front.writer.transport.abort()
        # Give the readers one more turn of the event loop, in which they notice that their connections ended.
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._next_connection
        self._next_connection += 1
        try:
            hello = front_decoder.decode(await asyncio.wait_for(read_frame(reader, MAX_HELLO_BYTES), _HELLO_SECONDS))
            problem = self._problem(hello)
            if problem:
                self._warn_once(problem)
                writer.close()
                return
            self._problems.solved()
            front = _Front(writer, self._stall_seconds)
            now = time.monotonic()
            front.write(frame(Welcome(epoch=self._status().epoch, pid=os.getpid())), now)
            front.write(frame(self._status()), now)
            self._fronts[connection] = front
            while True:
                message = front_decoder.decode(await read_frame(reader))
                if isinstance(message, SubmitChoices):
                    for submit in message.with_prompt():
                        self._inbox.put(connection, submit)
                elif not isinstance(message, Hello):
                    self._inbox.put(connection, message)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the front is gone; its sequences are dropped below
        except (msgspec.DecodeError, ValueError) as error:
            self._warn_once(f"a connection sent an invalid message: {error}")
        finally:
            if self._fronts.pop(connection, None) is not None:
                self._inbox.put(connection, Disconnected())
            writer.close()

    def _problem(self, hello: object) -> str:
        """Returns the reason to refuse a connection; empty if it is accepted."""
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "refused a connection without the right token"
        if hello.version != PROTOCOL_VERSION:
            return f"refused front {hello.front_id}: protocol {hello.version}, ours is {PROTOCOL_VERSION}"
        return ""

    def _warn_once(self, problem: str) -> None:
        # Log it once only, because a refused front tries again four times a second, for ever.
        if self._problems.is_new(problem):
            logger.warning("%s; repetitions are not logged until a front is accepted", problem)

    def _write(self, connection: int, data: bytes) -> None:
        front = self._fronts.get(connection)
        if front is None or front.writer.transport.is_closing():
            return
        front.write(data, time.monotonic())
        if front.num_unsent > _MOST_UNSENT_BYTES:
            logger.warning("connection %d has %d bytes unread; closed", connection, front.num_unsent)
            front.writer.transport.abort()

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for connection, front in self._fronts.items():
            if front.has_stalled(now):
                logger.warning("connection %d reads its messages too slowly; closed", connection)
                front.writer.transport.abort()

    def _broadcast(self, status: CoreStatus) -> None:
        data = frame(status)
        for connection in list(self._fronts):
            self._write(connection, data)

    async def _flush_status(self) -> None:
        self._broadcast(self._status())
        for front in list(self._fronts.values()):
            try:
                await asyncio.wait_for(front.writer.drain(), 1.0)
            except (ConnectionError, TimeoutError):
                continue  # gone, or too slow to matter
