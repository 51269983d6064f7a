"""Channel: a blocking connection for messages between core and rank, and the handshake that opens it.

The sockets are blocking, because each side waits for one message at a time. A step costs one write and one read,
without a thread switch. A core and a rank on one machine exchange messages through shared memory. The connection stays
open for two reasons: its end shows the death of the peer, and it carries messages that are too large for the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from typing import TypeVar

import msgspec

from rayloom_engine.protocol.framing import MAX_FRAME_BYTES, MAX_HELLO_BYTES
from rayloom_engine.protocol.ranks import (
    RANK_PROTOCOL_VERSION,
    Challenge,
    Greeting,
    MemoryOffer,
    MemoryOpened,
    Message,
    Welcomed,
)
from rayloom_engine.protocol.shared_memory import SharedMemory, make_memory, open_memory

_HANDSHAKE_SECONDS = 5.0
# seconds of silence after which a peer cannot be a rank, because a rank answers the challenge at once
_FIRST_BYTE_SECONDS = 1.0
# A host that loses power closes no connections. Without these limits, the peers of its processes would wait without
# end.
_TCP_LIMITS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

M = TypeVar("M")


class ChannelClosed(ConnectionError):
    """The peer is gone, or sent an unexpected message."""


class Channel:
    """Messages over a connected socket, or over shared memory next to it.

    One thread may send while another receives, if the receiver uses no time-out.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._memory: SharedMemory | None = None
        limit_tcp(connection)

    @property
    def local_host(self) -> str:
        """The address at which the peer reaches this machine."""
        return str(self._socket.getsockname()[0])

    def limit_sends(self, seconds: float) -> None:
        """Makes a send raise ChannelClosed if the peer reads nothing for `seconds`.

        So a stopped peer does not block the sender without end.
        """
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def filenos(self) -> tuple[int, ...]:
        """Returns descriptors to poll. One of them becomes readable when a message arrives or the peer is gone."""
        connection = (self._socket.fileno(),)
        return connection if self._memory is None else (self._memory.fileno(), *connection)

    @property
    def transport(self) -> str:
        return "TCP" if self._memory is None else "shared memory"

    @property
    def has_ended(self) -> bool:
        """True if the peer is known to have closed the connection. Reads nothing."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: Message) -> None:
        """Sends one message. Raises ChannelClosed if the peer is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Sends the result of `encode`, so that a message to many peers is encoded only once."""
        try:
            if self._memory is None or not self._memory.send(data):
                self._socket.sendall(data)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, at_most: int = MAX_FRAME_BYTES) -> Message:
        """Returns the next message. Raises ChannelClosed if the peer is gone, TimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            frame = None if self._memory is None else self._memory.receive(timeout_s)
            if frame is not None:
                return _decoder.decode(frame[4:])
            size = int.from_bytes(self._read(4, deadline), "big")
            if size > at_most:
                raise ChannelClosed(f"a frame of {size} bytes, at most {at_most} allowed")
            return _decoder.decode(self._read(size, deadline))
        except TimeoutError:
            raise
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ChannelClosed(str(error) or type(error).__name__) from error
        finally:
            if deadline is not None:
                with contextlib.suppress(OSError):  # the channel was closed meanwhile
                    self._socket.settimeout(None)

    def expect(self, kind: type[M], timeout_s: float | None = None, at_most: int = MAX_FRAME_BYTES) -> M:
        """Receives a message of the type `kind`. Raises ChannelClosed if it is of another type."""
        message = self.receive(timeout_s, at_most)
        if not isinstance(message, kind):
            raise ChannelClosed(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer has disconnected already
            # shutdown ends the read of a thread that is blocked in this socket; close alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._memory is not None:
            self._memory.close()

    def offer_memory(self) -> None:
        """Offers the peer shared memory for all further messages, and uses it if the peer opens it. Raises OSError.

        Called on the core's side. Does nothing if the peer is on another machine, or this machine lacks the memory.
        """
        if self._socket.getpeername()[0] != self._socket.getsockname()[0]:
            return
        if (made := make_memory(self._socket.fileno())) is None:
            return
        memory, offer = made
        try:
            self.send(offer)
            is_open = self.expect(MemoryOpened, _HANDSHAKE_SECONDS, MAX_HELLO_BYTES).is_open
        except BaseException:
            memory.close()
            raise
        if is_open:
            self._memory = memory
        else:
            memory.close()

    def take_memory(self, offer: MemoryOffer) -> None:
        """Uses the offered memory for all further messages, if this process can open it. Raises ChannelClosed.

        Called on the rank's side.
        """
        memory = open_memory(offer, self._socket.fileno())
        self.send(MemoryOpened(memory is not None))
        self._memory = memory

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if deadline is not None:
                # The deadline is for the whole message, not for each read.
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            num = self._socket.recv_into(view)
            if num == 0:
                raise ChannelClosed("connection closed")
            view = view[num:]
        return data


def limit_tcp(connection: socket.socket) -> None:
    """Lets a TCP connection end within 20 s if the peer's machine is gone. Does nothing to other sockets."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_LIMITS.items():
        if hasattr(socket, name):  # some systems lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def dial(
    address: str, token: str, greeting: Greeting, timeout_s: float = _HANDSHAKE_SECONDS
) -> tuple[Channel, Welcomed]:
    """Connects to the core at HOST:PORT. Returns the channel and the core's Welcomed. Raises OSError.

    Sends `greeting` with a proof that this process has the token.
    """
    host, _, port = address.rpartition(":")
    channel = Channel(socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s))
    try:
        challenge = channel.expect(Challenge, timeout_s)
        if challenge.version != RANK_PROTOCOL_VERSION:
            raise ChannelClosed(f"the core speaks rank protocol {challenge.version}, this rank {RANK_PROTOCOL_VERSION}")
        channel.send(msgspec.structs.replace(greeting, proof=_proof(token, challenge.nonce, greeting)))
        answer = channel.receive(timeout_s)
        if isinstance(answer, MemoryOffer):
            channel.take_memory(answer)
            answer = channel.receive(timeout_s)
        if not isinstance(answer, Welcomed):
            raise ChannelClosed(f"expected Welcomed, got {type(answer).__name__}")
        return channel, answer
    except BaseException:
        channel.close()
        raise


def welcome(connection: socket.socket, token: str) -> tuple[Channel, Greeting]:
    """The core's side of `dial`. Returns the channel and the greeting, whose proof is verified.

    The caller then sends Welcomed. Raises OSError.
    """
    channel = Channel(connection)
    nonce = secrets.token_hex(16)
    channel.send(Challenge(nonce))
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(1000 * _FIRST_BYTE_SECONDS):
        raise ChannelClosed(f"no greeting within {_FIRST_BYTE_SECONDS:g} s")
    greeting = channel.expect(Greeting, _HANDSHAKE_SECONDS, MAX_HELLO_BYTES)
    if not hmac.compare_digest(greeting.proof.encode(), _proof(token, nonce, greeting).encode()):
        raise ChannelClosed("wrong token")
    return channel, greeting


def _proof(token: str, nonce: str, greeting: Greeting) -> str:
    signed = f"{nonce}/{greeting.role}/{greeting.rank}/{greeting.incarnation}"
    return hmac.new(token.encode(), signed.encode(), hashlib.sha256).hexdigest()
