"""The HTTP servers of the front: uvicorn, with BoundedProtocol and ConnectionTable."""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
from collections.abc import Generator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from rayloom_engine.common.rare_lines import RareLines
from rayloom_engine.front.http.connections import ADMIN_CONNECTIONS, MAX_CONNECTIONS, ConnectionTable, connection_room
from rayloom_engine.front.http.protocol import BoundedProtocol, HttpLimits

# Clients and proxies keep idle connections in a pool for less time than this. So they close a connection before the
# server does. They never send a request on a connection that the server is closing.
KEEP_ALIVE_S = 75

# uvicorn's log lines about faulty requests.
CLIENT_FAULTS = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected. Please use \"pip install 'uvicorn[standard]'\", "
    "or install 'websockets' or 'wsproto' manually.",
)


class Server(uvicorn.Server):
    """uvicorn without signal handlers: two servers share this process, and the front itself handles the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def api_server(app: ASGIApp, limits: HttpLimits | None = None) -> Server:
    """Returns the API port's server. Call its serve(sockets=[...]).

    The limit of open files determines the server's connection limit.
    """
    room = connection_room(_raised_file_limit())
    return _server(app, ConnectionTable(room.limit), room.backlog, limits or HttpLimits())


def admin_server(app: ASGIApp) -> Server:
    """Returns the admin port's server. This server refuses no connection: `connection_room` reserves files for its
    connections."""
    return _server(app, ConnectionTable(ADMIN_CONNECTIONS, refuses=False), ADMIN_CONNECTIONS, HttpLimits())


def _server(app: ASGIApp, connections: ConnectionTable, backlog: int, limits: HttpLimits) -> Server:
    _keep_lines_rare()
    protocol = functools.partial(BoundedProtocol, connections=connections, limits=limits)
    return Server(
        uvicorn.Config(
            app,
            http=cast("type[BoundedProtocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=backlog,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )


def _keep_lines_rare() -> None:
    """Limits how often uvicorn warns of faulty requests: any client can cause them at any rate, even without a key."""
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(known, RareLines) for known in log.filters):
        log.addFilter(RareLines(CLIENT_FAULTS))


def _raised_file_limit() -> int:
    """Raises the limit of open files to the front's need, if the hard limit allows it. Returns the limit.

    Shells often set 1,024, far below the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2 * MAX_CONNECTIONS
    wanted = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
    if wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft
