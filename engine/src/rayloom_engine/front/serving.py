"""FrontServer: runs the API port, the admin port and the connections to engines, until a signal ends the process.

SIGTERM starts a drain: new requests get 503. Running requests, including those of gateways, may finish within
drain_seconds. These seconds count from the SIGTERM, or from an earlier POST /drain. SIGINT, or a second SIGTERM, ends
the process without waiting for requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any, Protocol

from starlette.types import ASGIApp

from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import EngineDead
from rayloom_engine.front.http.server import admin_server, api_server
from rayloom_engine.front.operations.lifecycle import Lifecycle

LAST_EVENTS_S = 0.3  # seconds for handlers to write a last event before the process exits
FORCED_EXIT_S = 0.8  # seconds after which the process exits, even if a thread still runs

logger = logging.getLogger(__name__)


class ServingState(Protocol):
    """The state behind the ports of a process: a `Service`, or all models of a gateway."""

    lifecycle: Lifecycle

    async def run(self) -> None:
        """Keeps the connections to engines open until `run` is cancelled."""

    def fail_all(self, error: Exception) -> None:
        """Ends every unfinished sequence with `error`."""

    async def wait_for_gateways(self, timeout_s: float) -> int:
        """Waits in a drain until gateways have no sequences here. Returns how many are left after `timeout_s`."""


class FrontServer:
    """Runs the API server, the admin server and the connection to the core. On SIGTERM, drains before it ends."""

    def __init__(
        self,
        config: EngineConfig,
        service: ServingState,
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
        self._beside: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None  # the error of a task in `_beside`
        service.lifecycle.close_connections = self._close_connections

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` and cancels it at the end of `run`. If `work` raises an error, the process ends."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._end_on_error)
        self._beside.append(task)

    async def run(self) -> int:
        """Runs both servers and the connection to the core until a signal or `give_up` ends them.

        Returns the exit code. Raises the error of a server or connection that ends by itself, or of work that was given
        to `run_beside`.
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
        # Neither a server nor the core task may end by itself. If one of these tasks ends, `task.result()` below raises
        # the task's error, which ends the process.
        done, _ = await asyncio.wait([*serving, core, stop], return_when=asyncio.FIRST_COMPLETED)
        for server in self._servers:
            server.should_exit = True
        await asyncio.wait(serving)
        core.cancel()
        for beside in self._beside:
            beside.cancel()
        for task in done:
            task.result()
        if self._error is not None:
            raise self._error
        return self._exit_code

    def give_up(self) -> None:
        """Ends the process, because the model cannot be used. A restart would not help."""
        self._exit_code = EXIT_CONFIG
        self._stop.set()

    def _end_on_error(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a background task failed, so this process ends", exc_info=error)
            self._error = self._error or error
            self._stop.set()

    def _close_connections(self) -> None:
        """Closes idle connections soon, and busy connections after their answer, so that clients use other engines."""
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
        logger.info(
            "draining: %d requests in flight, %d connections that read kept answers, at most %.0f s",
            lifecycle.num_in_flight,
            lifecycle.num_readers,
            left_s,
        )
        if not await lifecycle.wait_idle(left_s):
            logger.warning(
                "%d requests were not finished in time; %d connections still read kept answers",
                lifecycle.num_in_flight,
                lifecycle.num_readers,
            )
            self._service.fail_all(EngineDead("the engine was stopped before this request was finished"))
            await lifecycle.wait_idle(LAST_EVENTS_S)
        elif num_left := await self._service.wait_for_gateways(lifecycle.drain_left_s(self._config.drain_seconds)):
            logger.warning("%d sequences of gateways were not finished in time", num_left)
        else:
            logger.info("drained")
        self._stop.set()
        # A client that does not read its last bytes must not delay the exit.
        asyncio.get_running_loop().call_later(FORCED_EXIT_S, os._exit, 0)

    def _stop_now(self) -> None:
        self._service.lifecycle.stop()
        self._service.fail_all(EngineDead("the engine was stopped before this request was finished"))
        self._stop.set()
        # At exit the interpreter would wait for running threads, such as one that tokenises a long prompt.
        asyncio.get_running_loop().call_later(FORCED_EXIT_S, os._exit, 0)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
