"""EngineLink: the connection to the core of one engine, its newest status, and an estimate of its work and cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.front.core_link.handshake import CoreAddress, ProtocolError, connect
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.messages import CoreMessage, CoreStatus, WantStatus, Welcome
from rayloom_engine.routing.engine_estimate import EngineEstimate

BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 0.25  # a core restarts within seconds; a longer wait would lengthen the pause in clients' streams
# A status that arrived less than this many seconds ago is not requested again. So clients that read the metrics without
# a pause do not keep the core busy.
_NEW_STATUS_S = 0.05
LATE_S = 3.0  # if more seconds are between two calls of `check_silence`, the event loop was blocked in between
_CONNECTION_ERRORS = (OSError, EOFError, ValueError, TimeoutError, msgspec.MsgspecError, ProtocolError)

logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    """The owner of links. Its methods are called on the event loop, after the link's own state is up to date."""

    def connected(self, link: EngineLink, welcome: Welcome) -> None: ...

    def disconnected(self, link: EngineLink, problem: str, *, is_loss: bool = True) -> None: ...

    def received(self, link: EngineLink, message: CoreMessage) -> None: ...


class EngineLink:
    """The connection to one core. For one event loop."""

    def __init__(self, name: str, core: CoreAddress, listener: LinkListener, silence_s: float | None = None) -> None:
        """`silence_s`: seconds of silence after which the core is lost; None: the supervisor watches the core."""
        self.name = name
        self.core = core
        self.estimate = EngineEstimate(name)  # computed from the reports on the current connection
        self.status: CoreStatus | None = None  # the latest status on any connection, perhaps of a core that is gone
        # the list of LoRA adapters that the engine last reported; None: the engine has never reported a list
        self.adapters: tuple[Adapter, ...] | None = None
        self.pid = 0  # process id of the core on the current connection, or on the last connection
        self.version = 0  # protocol version of the current connection, or of the last connection
        self.is_connected = False
        self.is_serving = False  # according to the latest status on the current connection
        self.is_leaving = False  # the engine is no longer in the list of engines, so it gets no new sequences
        self.served_at_s = 0.0  # time.monotonic of the latest status that said "serving"
        self._status_at_s = 0.0
        self._next_status = asyncio.Event()  # set when the next status arrives, or when the connection ends
        self._is_status_due = False  # a status was requested, and `_next_status` is not set yet
        self._heard_at_s = 0.0
        self._checked_at_s = 0.0  # time.monotonic of the last `check_silence`
        self._listener = listener
        self._silence_s = silence_s
        self.is_encrypted = False  # the current connection, or the last connection, uses TLS
        self._writer: asyncio.StreamWriter | None = None
        self._send: Callable[[bytes], None] = _not_connected

    @property
    def status_age_s(self) -> float:
        """Seconds since `status` arrived. Add them to the ages in `status`: a hung core sends no newer status."""
        return time.monotonic() - self._status_at_s

    @property
    def is_draining(self) -> bool:
        return self.status is not None and self.status.is_draining

    @property
    def fingerprint(self) -> Fingerprint | None:
        model = self.status.model if self.status is not None else None
        return None if model is None else model.fingerprint

    @property
    def max_model_len(self) -> int | None:
        model = self.status.model if self.status is not None else None
        return None if model is None else model.max_model_len

    @property
    def hidden_size(self) -> int:
        """Width of the embeddings that the engine takes as prompts; 0: it takes none, or has sent no status yet."""
        model = self.status.model if self.status is not None else None
        return 0 if model is None else model.hidden_size

    @property
    def takes_adapters(self) -> bool:
        """True if the engine may accept a sequence with a LoRA adapter that it has not reported."""
        return self.adapters is not None and self.status is not None and self.status.takes_adapters

    async def run(self) -> None:
        """Connects, receives messages, and reconnects when the connection ends. Runs until it is cancelled."""
        backoff_s = BACKOFF_MIN_S
        last_problem = ""
        while True:
            try:
                await self._converse()
            except _CONNECTION_ERRORS as error:
                problem = f"{type(error).__name__}: {error}"
                if self.is_connected:
                    self._disconnected(problem)
                    backoff_s = BACKOFF_MIN_S
                    last_problem = ""
                elif problem != last_problem:
                    # Log a problem once, not at every attempt.
                    logger.info("waiting for the core at %s: %s", self.core.address, problem)
                    last_problem = problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    def send(self, data: bytes) -> None:
        """Sends messages. The link must be connected."""
        # drain() is not awaited. The buffer is bounded, because the number of accepted requests is limited, and so are
        # the bytes of their embeddings (MAX_HELD_EMBEDS_BYTES). If the core is dead, the read loop ends the connection.
        self._send(data)

    async def _converse(self) -> None:
        connection = await connect(self.core)
        try:
            self._writer = connection.writer
            self._send = connection.send
            self.is_encrypted = connection.is_encrypted
            self.pid = connection.welcome.pid
            self.version = connection.welcome.version
            self.is_connected = True
            self._heard_at_s = time.monotonic()
            self._listener.connected(self, connection.welcome)
            while True:
                self._receive(core_decoder.decode(await read_frame(connection.reader)))
        finally:
            self._writer = None
            self._send = _not_connected
            connection.writer.transport.abort()

    async def renew_status(self, at_most_s: float) -> None:
        """Requests a status. Returns once it has arrived, or after `at_most_s`; then `status` is the last one.

        Only for the front inside an engine.
        """
        if not self.is_connected or self.status_age_s < _NEW_STATUS_S:
            return
        if not self._is_status_due:
            self._is_status_due = True
            self.send(frame(WantStatus()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._next_status.wait(), at_most_s)

    def check_silence(self) -> None:
        """Ends the connection if the core has sent nothing for too long. A living core sends a status every second.

        Call it every second. After a longer pause this process was stopped, or its event loop was blocked. Messages of
        the core may then wait to be read, so this call does nothing.
        """
        now_s = time.monotonic()
        is_late = now_s - self._checked_at_s > LATE_S
        self._checked_at_s = now_s
        age_s = now_s - self._heard_at_s
        if self._silence_s is not None and self._writer is not None and age_s > self._silence_s and not is_late:
            logger.warning("%s has sent nothing for %.1f s; its connection is ended", self.name, age_s)
            self._writer.transport.abort()

    def _receive(self, message: CoreMessage) -> None:
        self._heard_at_s = time.monotonic()
        if isinstance(message, CoreStatus):
            self.status = message
            self._status_at_s = time.monotonic()
            self.is_serving = message.state == "serving"
            if message.adapters is not None:
                self.adapters = tuple(each.adapter for each in message.adapters)
            if self.is_serving:
                self.served_at_s = self._status_at_s
            self._end_wait()
        self._listener.received(self, message)

    def _end_wait(self) -> None:
        """Continues the callers of `renew_status`."""
        self._next_status.set()
        self._next_status = asyncio.Event()
        self._is_status_due = False

    def _disconnected(self, problem: str) -> None:
        self.is_connected = False
        self.is_serving = False
        self._end_wait()
        self.estimate = EngineEstimate(self.name)
        self._listener.disconnected(self, problem)


def _not_connected(data: bytes) -> None:
    raise AssertionError("the link is not connected")
