"""TlsSession: the TLS of one connection, without a socket. Bytes of the peer go in, bytes for the peer come out."""

from __future__ import annotations

import ssl
import threading

_READ_BYTES = 64 * 1024


class TlsSession:
    """One side of a connection. `seal` and `open` may run in two threads, because a lock guards OpenSSL's object."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """`server_name`: the name that the peer's certificate must have; None: this side accepts the connection."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()  # held while bytes are encrypted or decrypted, never for a system call
        self.has_ended = False  # True once the peer has announced the end of its data

    def shake_hands(self, data: bytes = b"") -> bool:
        """Processes bytes of the peer and returns whether this side of the handshake is complete.

        The caller then sends the bytes of `take_outgoing`, even after an error: these bytes contain the alert. Raises
        ssl.SSLError.
        """
        with self._lock:
            self._incoming.write(data)
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

    def take_outgoing(self) -> bytes:
        """Removes the bytes that the peer must get, and returns them."""
        with self._lock:
            return self._outgoing.read()

    def seal(self, data: bytes) -> bytes:
        """Returns all bytes that the peer must get now: pending bytes of TLS itself, then `data` encrypted.

        Send the results in the order of the calls. Raises ssl.SSLError, for example after `open` has raised it.
        """
        with self._lock:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]
            return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """Processes bytes of the peer and returns the decrypted data of all complete records. Raises ssl.SSLError.

        When the peer announces the end, `has_ended` becomes true, and all bytes after the end are dropped.
        """
        opened = bytearray()
        with self._lock:
            if self.has_ended:
                return b""
            self._incoming.write(data)
            try:
                while chunk := self._tls.read(_READ_BYTES):
                    opened += chunk
            except ssl.SSLWantReadError:
                pass
            else:
                self.has_ended = True
        return bytes(opened)

    @property
    def has_outgoing(self) -> bool:
        """True if the peer must get bytes, such as the answer to an update of its keys."""
        return self._outgoing.pending > 0

    @property
    def peer_certificate_end(self) -> str:
        """The time at which the peer's certificate expires, as OpenSSL writes it. The handshake must be complete."""
        found = self._tls.getpeercert()
        return "" if not found else str(found["notAfter"])
