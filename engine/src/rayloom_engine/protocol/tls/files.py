"""TlsFiles: certificate, private key and CA of one side of the connections between gateways and cores.

The files may be replaced at any time, as the kubelet does with a renewed Secret. Before each handshake they are checked
for changes, so the next connection uses a new certificate. Open connections continue.
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.protocol.tls.certificate_times import certificate_times
from rayloom_engine.tls_settings import TlsPaths

logger = logging.getLogger(__name__)


class TlsFiles:
    """The files of a server or of a client. Not thread-safe."""

    def __init__(self, paths: TlsPaths, *, is_server: bool) -> None:
        """Reads the files. Raises ConfigError that names a file which cannot be used."""
        self._paths = paths
        self._is_server = is_server
        self._stamps = self._current_stamps()
        self._context = _load(paths, is_server=is_server)
        _report_times(paths)

    def context(self) -> ssl.SSLContext:
        """Returns the context for a new connection, made from the files as they are now.

        Unusable files change nothing and are logged once. For example, the files are unusable when one of them is
        already renewed and the others are not.
        """
        stamps = self._current_stamps()
        if stamps != self._stamps:
            self._stamps = stamps  # taken before the files are read, so that a change during the read is not missed
            try:
                self._context = _load(self._paths, is_server=self._is_server)
            except ConfigError as error:
                logger.error("%s; the certificate read before it stays in use", error)
            else:
                logger.info("the certificate in %s was read again", self._paths.cert)
                _report_times(self._paths)
        return self._context

    def _current_stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._paths.cert, self._paths.key, self._paths.ca))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load(paths: TlsPaths, *, is_server: bool) -> ssl.SSLContext:
    for field, path in (("cert", paths.cert), ("key", paths.key), ("ca", paths.ca)):
        _check_readable(f"{paths.prefix}_{field}_file", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # a server, too, verifies its peer's certificate
    context.hostname_checks_common_name = False
    if is_server:
        # A resumed session would skip the check of the certificates. A gateway could then reconnect after its
        # certificate has expired.
        context.num_tickets = 0
    try:
        # Without a password here, OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(paths.cert, paths.key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(_chain_problem(paths, error)) from error
    try:
        context.load_verify_locations(cafile=paths.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{paths.prefix}_ca_file: {paths.ca} has no certificate that can be read; write the CA's certificate into "
            "it, in PEM format"
        ) from error
    return context


def _check_readable(field: str, path: Path) -> None:
    try:
        path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot read {path}: {error}") from error


def _chain_problem(paths: TlsPaths, error: Exception) -> str:
    try:
        certificate_times(paths.cert.read_text(encoding="ascii", errors="replace"))
    except (OSError, ValueError) as problem:
        return f"{paths.prefix}_cert_file: {paths.cert} has no certificate in PEM format ({problem})"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{paths.prefix}_key_file: {paths.key} is not the private key of the certificate in {paths.cert}"
    return (
        f"{paths.prefix}_key_file: {paths.key} has no private key that can be read ({error}); write it in PEM format, "
        "without a passphrase"
    )


def _report_times(paths: TlsPaths) -> None:
    """Logs a certificate that is not valid now. Such a certificate is accepted, so its renewal needs no restart."""
    try:
        times = certificate_times(paths.cert.read_text(encoding="ascii", errors="replace"))
    except (OSError, ValueError):  # the file is being replaced, or has a form that only OpenSSL reads
        return
    now = datetime.now(UTC)
    if now > times.end:
        logger.error(
            "%s_cert_file: the certificate in %s has expired at %s, so connections fail until the file is renewed",
            *(paths.prefix, paths.cert, times.end.isoformat()),
        )
    elif now < times.begin:
        logger.error(
            "%s_cert_file: the certificate in %s is not valid before %s; check the clocks",
            *(paths.prefix, paths.cert, times.begin.isoformat()),
        )
