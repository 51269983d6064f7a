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
        """Sends `data` encrypted, without waiting. Sends nothing on a broken connection: reads report the failure."""
        with contextlib.suppress(ssl.SSLError):
            self._send(self.session.seal(data))

    def send_with(self, send: Callable[[bytes], None]) -> None:
        """Makes `send` send all bytes from now on. The caller seals and sends its own messages.

        `send` must seal all bytes that it gets, even b"", because the sealed bytes also contain the bytes of TLS
        itself.
        """
        self._send = send

    async def readexactly(self, num: int) -> bytes:
        """Returns the next `num` bytes, decrypted.

        Raises asyncio.IncompleteReadError if the connection ends before that many bytes. Raises TlsRefused for bytes
        that are not from the peer, and if the peer refuses the certificate of this side.
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
    """Returns the stream after a handshake, in which each side has verified the other side's certificate.

    `server_name`: the name that the peer's certificate must have; None: the peer began the connection. All bytes in
    `reader` count as TLS. So if an attacker has added clear text after the peer's last message, the connection ends.
    The client's handshake is complete before the server has verified the client's certificate. So the client notices a
    refusal only at its first read. Raises TlsRefused, OSError or asyncio.IncompleteReadError. The caller must set a
    time limit.
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
