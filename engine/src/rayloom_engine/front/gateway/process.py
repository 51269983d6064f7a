"""The gateway's process: an API port and an admin port in front of the engines of a model. It imports no torch.

With `models_file`, models/process.py runs instead.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

import uvloop

from rayloom_engine.common.process import collect_garbage_seldom
from rayloom_engine.front.app import api_app
from rayloom_engine.front.core_link.handshake import addresses
from rayloom_engine.front.gateway.engines_dns import EnginesDns
from rayloom_engine.front.gateway.engines_file import EnginesFile
from rayloom_engine.front.gateway.gateway_config import GatewayConfig
from rayloom_engine.front.gateway.gateway_service import GatewayService
from rayloom_engine.front.gateway.link_tls import link_tls
from rayloom_engine.front.gateway.models.process import run_models
from rayloom_engine.front.gateway.text_cache import TextCache
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.operations.admin import admin_app, load_admin_token
from rayloom_engine.front.serving import FrontServer, url_of
from rayloom_engine.protocol.front_key import load_front_key

logger = logging.getLogger(__name__)


def run_gateway(config: GatewayConfig, api: socket.socket, admin: socket.socket) -> int:
    """Serves at two listening sockets until a signal ends the process. Returns the exit code. Raises ConfigError."""
    if config.gateway.models_file is not None:
        return run_models(config, api, admin)
    assert config.gateway.key_file is not None
    api_keys = ApiKeys.load(config.front.api_key_file, os.environ)
    admin_token = load_admin_token(config.front.admin_token_file)
    key = load_front_key(config.gateway.key_file, "key_file")
    tls = link_tls(config.gateway)
    name = f"gateway-{secrets.token_hex(8)}"
    own = config.gateway.engines
    file = None if config.gateway.engines_file is None else EnginesFile(Path(config.gateway.engines_file))
    dns = None if config.gateway.engines_dns is None else EnginesDns(config.gateway.engines_dns)
    source = file or dns
    cores = addresses({**own, **(file.read() if file is not None else {})}, key, name, tls=tls)
    cache = TextCache(Path(config.gateway.cache_dir), config.front.api_model_name)

    async def serve() -> None:
        service = GatewayService(config, cores, cache, api_url=url_of(api))
        api_keys.on_change = functools.partial(_count_keys, service, api_keys)
        api_keys.on_change()
        apps = (api_app(service, api_keys), admin_app(service, admin_token))
        front = FrontServer(config.front, service, (apps[0], api), (apps[1], admin))
        front.run_beside(api_keys.watch())
        if source is not None:

            def changed(engines: Mapping[str, str]) -> None:
                service.client.set_engines(addresses({**own, **engines}, key, name, tls=tls))

            front.run_beside(source.watch(changed))
        await front.run()

    collect_garbage_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def _count_keys(service: GatewayService, api_keys: ApiKeys) -> None:
    service.metrics.observe_api_keys(api_keys.num_keys, api_keys.problem)
