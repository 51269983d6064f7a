"""TlsStream: reads and writes through TLS on a connection that began in clear text."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

from rayloom_engine.protocol.tls.session import TlsSession

_READ_BYTES = 64 * 1024


class TlsRefused(ConnectionError):
    """The handshake failed, or the connection carried bytes that are not the peer's."""


class TlsStream:
    """A connection whose handshake is complete. For one event loop."""

    def __init__(self, reader: asyncio.StreamReader, session: TlsSession, send: Callable[[bytes], None]) -> None:
        """`send` sends encrypted bytes."""
        self.session = session
        self._reader = reader
        self._send = send
        self._opened = bytearray()

    def write(self, data: bytes) -> None:
        """Sends `data` encrypted, without waiting. Sends nothing on a broken connection: its reader sees that."""
        with contextlib.suppress(ssl.SSLError):
            self._send(self.session.seal(data))

    def send_with(self, send: Callable[[bytes], None]) -> None:
        """Leaves sending to the caller, who seals messages itself. `send` must seal what it gets, also nothing."""
        self._send = send

    async def readexactly(self, num: int) -> bytes:
        """Returns the next `num` bytes, decrypted.

        Raises asyncio.IncompleteReadError if the connection ends before, TlsRefused for bytes that the peer did not
        send, and for the peer's refusal of our certificate.
        """
        while len(self._opened) < num:
            data = b"" if self.session.has_ended else await self._reader.read(_READ_BYTES)
            if not data:
                raise asyncio.IncompleteReadError(bytes(self._opened), num)
            try:
                self._opened += self.session.open(data)
            except ssl.SSLError as error:
                raise TlsRefused(_reason(error)) from error
            if self.session.has_outgoing:
                self._send(b"")
        taken = bytes(self._opened[:num])
        del self._opened[:num]
        return taken


async def begin_tls(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, server_name: str | None = None
) -> TlsStream:
    """Returns the stream after a handshake, in which both sides have verified the other's certificate.

    `server_name`: the name that the peer's certificate must have; None: the peer began the connection. All bytes that
    `reader` has count as TLS, so clear text that somebody put behind the peer's last message ends the connection.

    A client's side is complete before the server has verified its certificate: the refusal comes with the first read.
    Raises TlsRefused, OSError or asyncio.IncompleteReadError. The caller bounds the time.
    """
    session = TlsSession(context, server_name)
    data = b""
    while True:
        try:
            is_complete = session.shake_hands(data)
        except ssl.SSLError as error:
            raise TlsRefused(_reason(error)) from error
        finally:
            writer.write(session.take_outgoing())
        if is_complete:
            return TlsStream(reader, session, writer.write)
        data = await reader.read(_READ_BYTES)
        if not data:
            raise asyncio.IncompleteReadError(b"", 1)


def _reason(error: ssl.SSLError) -> str:
    """Returns OpenSSL's words without its file names and codes."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return (error.reason or str(error)).replace("_", " ").lower()
