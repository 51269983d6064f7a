"""The listening sockets and the run folder of a server. They outlive all its processes except the supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.executor_choice import JobPlace
from rayloom_engine.protocol.front_key import load_front_key
from rayloom_engine.protocol.tls.files import TlsFiles

# A Unix socket's path may have at most 107 bytes. The longest path in the run folder is that of a local Ray:
# /ray/session_2026-11-24_08-05-50_796193_1234567/sockets/plasma_store
_MAX_RUN_DIR_BYTES = 107 - 70
_MAX_TMPDIR_BYTES = _MAX_RUN_DIR_BYTES - len("/rayloom-12345678")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind_sockets(config: EngineConfig) -> tuple[socket.socket, socket.socket]:
    """Returns the listening API and admin sockets.

    Raises ConfigError if a port is taken, or if the admin port needs no token and other machines can reach it.
    """
    if config.admin_host not in _LOOPBACK and config.admin_token_file is None:
        raise ConfigError(
            f"admin_host: {config.admin_host!r} can be reached from outside, so admin_token_file must be set; "
            "or use 127.0.0.1"
        )
    api = _listen(config.host, config.port, "port")
    try:
        return api, _listen(config.admin_host, config.admin_port, "admin_port")
    except ConfigError:
        api.close()
        raise


def bind_front_socket(config: EngineConfig) -> socket.socket | None:
    """Returns the EngineCore's listening socket for gateways, or None if front_port is not set.

    Raises ConfigError if the port is taken, or the key or a file for TLS cannot be used.
    """
    if config.front_port is None or config.front_key_file is None:
        return None
    load_front_key(config.front_key_file, "front_key_file")
    if config.front_tls_paths is not None:
        TlsFiles(config.front_tls_paths, is_server=True)
    return _listen(config.front_host, config.front_port, "front_port")


def bind_rank_socket(config: EngineConfig, job: JobPlace | None) -> socket.socket:
    """Returns the EngineCore's listening socket for ranks. It listens on loopback if all ranks run on this machine.

    The supervisor keeps the socket open. If ranks connect while the EngineCore restarts, they wait and are not refused.
    """
    if job is not None:
        return _listen("127.0.0.1" if job.is_on_one_host else "0.0.0.0", job.port, "rank_port")
    is_cluster = config.executor == "ray" and not starts_ray(config)
    return _listen("0.0.0.0" if is_cluster else "127.0.0.1", config.rank_port, "rank_port")


def starts_ray(config: EngineConfig) -> bool:
    """True if the server starts Ray on this machine, because no Ray cluster is configured."""
    return config.executor == "ray" and not (config.ray_address or os.environ.get("RAY_ADDRESS"))


def make_run_dir() -> Path:
    """Makes a new folder whose path is short enough for the Unix sockets in it. Raises ConfigError."""
    try:
        folder = tempfile.mkdtemp(prefix="rayloom-")
        if len(os.fsencode(folder)) > _MAX_RUN_DIR_BYTES:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="rayloom-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files: {error}; give the server a /tmp that it may write to, for example with "
            f"docker run --tmpfs /tmp, or set TMPDIR to a folder with a path of at most {_MAX_TMPDIR_BYTES} bytes"
        ) from error
    return Path(folder)


def lock_run_dir(folder: Path) -> int | None:
    """Locks the run folder as long as the returned descriptor is open. None: the file system has no locks.

    The folder is in the folder for temporary files, where systemd removes files that were not used for 10 days, such as
    the token. A core or rank could then not be restarted. systemd skips a folder with a lock (tmpfiles.d(5)).
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None


def url_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket, for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _listen(host: str, port: int, field: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error.strerror}; choose another one") from error
    return listener
