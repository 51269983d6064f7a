"""FrontSocket: the core's sending side of the connection to a front. Sending never blocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

from rayloom_engine.core_server.unsent import Unsent
from rayloom_engine.protocol.tls.session import TlsSession


class FrontSocket:
    """The socket of a connected front. Sends messages whole and in order, from the main thread and the I/O thread.

    The main thread sends the outputs of a step itself. To send them, the I/O thread would need the GIL. It might get
    the GIL only when the next step releases it. Bytes that the socket does not accept are kept, and the I/O thread
    sends them with `flush` when the socket has room.
    """

    def __init__(self, connection: socket.socket, stall_seconds: float, tls: TlsSession | None = None) -> None:
        """`connection`: a duplicate of the connection's socket, which this object owns. `tls` encrypts messages."""
        connection.setblocking(False)
        self._socket = connection
        self._tls = tls
        # Held while a message is encrypted and sent, because messages must be sent in the order of their encryption.
        # The lock is held for at most one system call, which does not block.
        self._lock = threading.Lock()
        self._unsent = Unsent(stall_seconds)
        self._is_closed = False

    def fileno(self) -> int:
        """Returns the descriptor that becomes writable when the socket has room; -1 after `close`."""
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes of messages that the operating system has not accepted yet, because the front reads slowly."""
        return self._unsent.num_bytes

    def send(self, data: bytes, now: float) -> bool:
        """Sends a message. Keeps the bytes that the socket does not accept at once.

        Returns True if this message leaves unsent bytes, and there were none before. The I/O thread must then begin to
        call `flush`. Does nothing after `abort`, or once the peer is gone.
        """
        with self._lock:
            if self._is_closed:
                return False
            if self._tls is not None:
                try:
                    data = self._tls.seal(data)
                except ssl.SSLError:  # the I/O thread has read a TLS alert, or bytes that are not from the peer
                    self._end()
                    return False
            if self._unsent.num_bytes:
                self._unsent.keep(memoryview(data), now)
                return False
            num = self._try_send(memoryview(data))
            if num < len(data) and not self._is_closed:
                self._unsent.keep(memoryview(data)[num:], now)
                return True
            return False

    def flush(self) -> bool:
        """Sends unsent bytes with one system call. Returns True if none are left."""
        with self._lock:
            if self._unsent.num_bytes:
                num = self._try_send(self._unsent.oldest())
                if not self._is_closed:
                    self._unsent.sent(num)
            return not self._unsent.num_bytes

    def has_stalled(self, now: float) -> bool:
        """True if the front has not read the oldest unsent message in time."""
        with self._lock:
            return self._unsent.has_stalled(now)

    def abort(self) -> None:
        """Ends the connection in both directions and drops unsent bytes. The connection's reader gets end-of-file."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Ends the connection and frees the descriptor. The I/O thread must no longer watch the descriptor."""
        with self._lock:
            self._end()
            self._socket.close()

    def _try_send(self, data: memoryview) -> int:
        """Returns how many bytes the socket has accepted. Ends the connection if the peer is gone."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._end()
            return 0

    def _end(self) -> None:
        self._is_closed = True
        self._unsent.clear()
        with contextlib.suppress(OSError):  # the peer may have ended the connection already
            self._socket.shutdown(socket.SHUT_RDWR)
