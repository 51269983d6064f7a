"""The listening sockets and the run folder of a server, made before any child starts, to outlive every child."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.executor_choice import JobPlace

# A Unix socket's path holds 107 bytes. The longest path in the folder is that of a local Ray:
# /ray/session_2026-11-24_08-05-50_796193_1234567/sockets/plasma_store
_MAX_RUN_DIR_BYTES = 107 - 70
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind_sockets(config: EngineConfig) -> tuple[socket.socket, socket.socket]:
    """API and admin socket, listening. Raises ConfigError when a port is taken or the admin port is unprotected."""
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


def bind_rank_socket(config: EngineConfig, job: JobPlace | None) -> socket.socket:
    """The socket at which ranks reach the EngineCore; open to other machines only when ranks are there.

    Ranks that dial while the EngineCore restarts wait instead of being refused.
    """
    if job is not None:
        return _listen("127.0.0.1" if job.is_on_one_host else "0.0.0.0", job.port, "rank_port")
    is_cluster = config.executor == "ray" and not starts_ray(config)
    return _listen("0.0.0.0" if is_cluster else "127.0.0.1", config.rank_port, "rank_port")


def starts_ray(config: EngineConfig) -> bool:
    """True if the server starts a Ray on this machine, because no Ray cluster is named."""
    return config.executor == "ray" and not (config.ray_address or os.environ.get("RAY_ADDRESS"))


def make_run_dir() -> Path:
    """A new folder whose path is short enough for the Unix sockets in it."""
    folder = tempfile.mkdtemp(prefix="rayloom-")
    if len(os.fsencode(folder)) > _MAX_RUN_DIR_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="rayloom-", dir="/tmp")
    return Path(folder)


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket for clients on this machine."""
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
