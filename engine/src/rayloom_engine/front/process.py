"""The API server process ("front"): `python -m rayloom_engine.front`. It inherits two listening sockets from the
supervisor.

SIGTERM drains: new requests get 503, and running ones may finish within drain_seconds, counted from the SIGTERM or from
an earlier POST /drain. SIGINT, or a second SIGTERM, ends the process without waiting for requests.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import secrets
import signal
import socket
import time
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from rayloom_engine.common.process import (
    EXIT_CONFIG,
    PULSE_SECONDS,
    end_with_parent,
    give_sign,
    set_up_logging,
    write_failure,
)
from rayloom_engine.config import EngineConfig, load_config
from rayloom_engine.errors import ConfigError, EngineDead
from rayloom_engine.front.app import api_app
from rayloom_engine.front.core_link.core_client import CoreAddress
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.http.server import admin_server, api_server
from rayloom_engine.front.operations.admin import admin_app, age_of_drain, load_admin_token
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.service import FrontStart, Service

LAST_EVENTS_S = 0.3  # time for handlers to write a last event before the process exits
FORCED_EXIT_S = 0.8  # after this time the process exits, even if a thread still runs

logger = logging.getLogger(__name__)


class Front:
    """Runs the API server, the admin server and the connection to the core. On SIGTERM, drains before it ends."""

    def __init__(
        self,
        config: EngineConfig,
        service: Service,
        api: tuple[ASGIApp, socket.socket],
        admin: tuple[ASGIApp, socket.socket],
    ) -> None:
        self._config = config
        self._service = service
        self._sockets = (api[1], admin[1])
        self._servers = (api_server(api[0]), admin_server(admin[0]))
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None
        service.lifecycle.close_connections = self._close_connections

    async def run(self) -> int:
        """Runs both servers and the connection to the core until a signal or `give_up` ends them.

        Returns the exit code. If one of them ends by itself, raises its error.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(self._servers, self._sockets, strict=True)
        ]
        core = asyncio.create_task(self._service.run())
        stop = asyncio.create_task(self._stop.wait())
        # Neither a server nor the core task may end by itself: `task.result()` below raises its error and ends the
        # process.
        done, _ = await asyncio.wait([*serving, core, stop], return_when=asyncio.FIRST_COMPLETED)
        for server in self._servers:
            server.should_exit = True
        await asyncio.wait(serving)
        core.cancel()
        for task in done:
            task.result()
        return self._exit_code

    def give_up(self) -> None:
        """Ends the process, because the model cannot be used. A restart would not help."""
        self._exit_code = EXIT_CONFIG
        self._stop.set()

    def _close_connections(self) -> None:
        """Closes idle connections now, and busy ones after their answer, so that clients reconnect to other engines."""
        for connection in list(self._servers[0].server_state.connections):
            connection.shutdown()

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if number == signal.SIGTERM and self._num_signals == 1:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._stop_now()

    async def _drain(self) -> None:
        lifecycle = self._service.lifecycle
        lifecycle.stop()
        left_s = lifecycle.drain_left_s(self._config.drain_seconds)
        logger.info("draining: %d requests in flight, at most %.0f s", lifecycle.num_in_flight, left_s)
        if await lifecycle.wait_idle(left_s):
            logger.info("drained")
        else:
            logger.warning("%d requests were not finished in time", lifecycle.num_in_flight)
            self._service.client.fail_all(EngineDead("the engine was stopped before this request was finished"))
            await lifecycle.wait_idle(LAST_EVENTS_S)
        self._stop.set()
        # A client that does not read its last bytes must not delay the exit.
        asyncio.get_running_loop().call_later(FORCED_EXIT_S, os._exit, 0)

    def _stop_now(self) -> None:
        self._service.lifecycle.stop()
        self._service.client.fail_all(EngineDead("the engine was stopped before this request was finished"))
        self._stop.set()
        # At exit the interpreter would wait for running threads, such as one that tokenises a long prompt.
        asyncio.get_running_loop().call_later(FORCED_EXIT_S, os._exit, 0)


def write_mark(mark: Path) -> None:
    """Creates the file `mark`. Only logs a failure, because a front on a full disk must still answer requests."""
    try:
        mark.touch()
    except OSError as error:
        logger.warning("cannot write %s: %s; after a restart /health is 503 until the model is loaded", mark, error)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.front", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="unix:PATH or tcp:HOST:PORT of the core")
    parser.add_argument("--api-fd", type=int, required=True, help="listening socket of the API port")
    parser.add_argument("--admin-fd", type=int, required=True, help="listening socket of the admin port")
    parser.add_argument("--parent", type=int, required=True, help="id of the parent; this process ends with it")
    parser.add_argument("--start", type=int, default=1, help="number of this start of the front, from 1")
    parser.add_argument("--server-started", type=float, default=time.time(), help="Unix time of the first start")
    parser.add_argument("--pulse-fd", type=int, help="pipe to the supervisor, for signs of life")
    args = parser.parse_args()
    end_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_up_logging("front", config.log_level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop lines repeat the supervisor's
    api_socket = socket.socket(fileno=args.api_fd)
    admin_socket = socket.socket(fileno=args.admin_fd)
    try:
        api_keys = ApiKeys.load(config.api_key_file, os.environ)
        admin_token = load_admin_token(config.admin_token_file)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    token = (args.run_dir / "token").read_text().strip()

    async def serve() -> int:
        service = Service(
            config,
            CoreAddress(args.core_address, token, f"front-{secrets.token_hex(8)}"),
            api_url=_url(api_socket),
            start=FrontStart(args.start, args.server_started),
        )
        drain_mark = args.run_dir / "draining"
        drain_age_s = age_of_drain(drain_mark)
        if drain_age_s is not None:
            service.lifecycle.drain(True, drain_age_s)
        loaded_mark = args.run_dir / "loaded"  # `loaded` and `draining` are files, so they outlive this process
        service.lifecycle.was_loaded = loaded_mark.exists()
        service.lifecycle.on_ready = functools.partial(write_mark, loaded_mark)
        api = api_app(service, api_keys)
        admin = admin_app(service, admin_token, drain_mark)
        api_keys.on_change = lambda: service.metrics.observe_api_keys(len(api_keys.accepted), api_keys.problem)
        api_keys.on_change()
        beside = [asyncio.create_task(api_keys.watch())]
        if args.pulse_fd is not None:
            beside.append(asyncio.create_task(_pulse(args.pulse_fd, service.lifecycle)))
        front = Front(config, service, (api, api_socket), (admin, admin_socket))

        def give_up(reason: str) -> None:
            write_failure(args.run_dir, reason)
            front.give_up()

        service.on_unusable = give_up
        code = await front.run()
        for task in beside:
            task.cancel()
        return code

    gc.freeze()  # imported objects are never garbage; scanning them would only delay the streams
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


async def _pulse(fd: int, lifecycle: Lifecycle) -> None:
    """Sends the pulse to the supervisor.

    Runs on the event loop and not in a thread: if the loop hangs, the front answers nobody, and the pulse must stop.
    """
    while True:
        give_sign(fd, lifecycle.was_ready)
        await asyncio.sleep(PULSE_SECONDS)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
