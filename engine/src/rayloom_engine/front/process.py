"""The API server process ("front"): `python -m rayloom_engine.front`. It inherits two listening sockets from the
supervisor.

Signals: front/serving.py.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import secrets
import socket
import time
from pathlib import Path

import uvloop

from rayloom_engine.common.process import (
    EXIT_CONFIG,
    PULSE_SECONDS,
    collect_garbage_seldom,
    drain_mark,
    end_with_parent,
    give_sign,
    set_up_logging,
    write_failure,
)
from rayloom_engine.config import load_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.app import api_app
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.operations.admin import admin_app, age_of_drain, load_admin_token
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.service import FrontStart, Service
from rayloom_engine.front.serving import FrontServer, url_of

logger = logging.getLogger(__name__)


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
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # uvicorn's log lines about start and stop repeat ours
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
            {"core": CoreAddress(args.core_address, token, f"front-{secrets.token_hex(8)}")},
            api_url=url_of(api_socket),
            start=FrontStart(args.start, args.server_started, args.run_dir / "adapters.json"),
        )
        mark = drain_mark(args.run_dir)
        drain_age_s = age_of_drain(mark)
        if drain_age_s is not None:
            service.lifecycle.drain(True, drain_age_s)
        loaded_mark = args.run_dir / "loaded"  # `loaded` and `draining` are files, so they outlive this process
        service.lifecycle.was_loaded = loaded_mark.exists()
        service.lifecycle.on_ready = functools.partial(write_mark, loaded_mark)
        api = api_app(service, api_keys)
        admin = admin_app(service, admin_token, mark, service.managed_adapters)
        api_keys.on_change = lambda: service.metrics.observe_api_keys(api_keys.num_keys, api_keys.problem)
        api_keys.on_change()
        front = FrontServer(config, service, (api, api_socket), (admin, admin_socket))
        front.run_beside(api_keys.watch())
        if args.pulse_fd is not None:
            front.run_beside(_pulse(args.pulse_fd, service.lifecycle))

        def give_up(reason: str) -> None:
            write_failure(args.run_dir, reason, by="front")
            front.give_up()

        service.on_unusable = give_up
        return await front.run()

    collect_garbage_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


async def _pulse(fd: int, lifecycle: Lifecycle) -> None:
    """Sends the pulse to the supervisor.

    Runs on the event loop and not in a thread: if the loop hangs, the front answers nobody, and the pulse must stop.
    """
    while True:
        give_sign(fd, lifecycle.was_ready)
        await asyncio.sleep(PULSE_SECONDS)
