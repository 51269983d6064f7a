"""A blocking connection that carries rank messages, and the handshake that opens it.

Blocking sockets, because both ends wait for exactly one thing: a step costs one write and one read, without a thread
switch in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import TypeVar

import msgspec

from rayloom_engine.protocol.framing import MAX_FRAME_BYTES
from rayloom_engine.protocol.ranks import RANK_PROTOCOL_VERSION, Challenge, Greeting, Message, Welcomed

_MAX_HELLO_BYTES = 64 * 1024  # nobody has proved anything yet
_HANDSHAKE_SECONDS = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

M = TypeVar("M")


class ChannelClosed(ConnectionError):
    """The peer is gone, or speaks another language."""


class Channel:
    """Messages over a connected socket. One thread may send while another receives without a time-out."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        """The address of this machine that reaches the peer."""
        return str(self._socket.getsockname()[0])

    def limit_sends(self, seconds: float) -> None:
        """A send that the peer takes nothing of for so long raises ChannelClosed: a stopped peer stops nobody."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the peer has hung up, as far as this machine knows; nothing is read."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: Message) -> None:
        """Raises ChannelClosed when the peer is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """`send` for what `encode` made, so that a message to many is encoded once."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, at_most: int = MAX_FRAME_BYTES) -> Message:
        """The next message, whole. Raises ChannelClosed when the peer is gone, TimeoutError when nothing came."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            size = int.from_bytes(self._read(4, deadline), "big")
            if size > at_most:
                raise ChannelClosed(f"a frame of {size} bytes, at most {at_most} allowed")
            return _decoder.decode(self._read(size, deadline))
        except TimeoutError:
            raise
        except (OSError, msgspec.MsgspecError) as error:
            raise ChannelClosed(str(error) or type(error).__name__) from error
        finally:
            if deadline is not None:
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._socket.settimeout(None)

    def expect(self, kind: type[M], timeout_s: float | None = None, at_most: int = MAX_FRAME_BYTES) -> M:
        """`receive`, and ChannelClosed when the message is of another kind."""
        message = self.receive(timeout_s, at_most)
        if not isinstance(message, kind):
            raise ChannelClosed(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            # Wakes a thread that is blocked in a read of this socket; close alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if deadline is not None:
                # The whole message has this long, not each of its bytes.
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            num = self._socket.recv_into(view)
            if num == 0:
                raise ChannelClosed("connection closed")
            view = view[num:]
        return data


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def dial(
    address: str, token: str, greeting: Greeting, timeout_s: float = _HANDSHAKE_SECONDS
) -> tuple[Channel, Welcomed]:
    """An accepted channel to the core at HOST:PORT. `greeting.proof` is filled in here. Raises OSError."""
    host, _, port = address.rpartition(":")
    channel = Channel(socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s))
    try:
        challenge = channel.expect(Challenge, timeout_s)
        if challenge.version != RANK_PROTOCOL_VERSION:
            raise ChannelClosed(f"the core speaks rank protocol {challenge.version}, this rank {RANK_PROTOCOL_VERSION}")
        channel.send(msgspec.structs.replace(greeting, proof=_proof(token, challenge.nonce, greeting)))
        return channel, channel.expect(Welcomed, timeout_s)
    except BaseException:
        channel.close()
        raise


def welcome(connection: socket.socket, token: str) -> tuple[Channel, Greeting]:
    """The core's side of `dial`; the caller sends Welcomed once it has made room. Raises OSError."""
    channel = Channel(connection)
    nonce = secrets.token_hex(16)
    channel.send(Challenge(nonce))
    greeting = channel.expect(Greeting, _HANDSHAKE_SECONDS, _MAX_HELLO_BYTES)
    if not hmac.compare_digest(greeting.proof.encode(), _proof(token, nonce, greeting).encode()):
        raise ChannelClosed("wrong token")
    return channel, greeting


def _proof(token: str, nonce: str, greeting: Greeting) -> str:
    said = f"{nonce}/{greeting.role}/{greeting.rank}/{greeting.incarnation}"
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()
