"""The process of a gateway with several models: an API port and an admin port in front of all their engines."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import uvloop

from rayloom_engine.common.process import collect_garbage_seldom
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.app import ApiApplication, port_middleware
from rayloom_engine.front.gateway.gateway_config import GatewayConfig
from rayloom_engine.front.gateway.link_tls import link_tls
from rayloom_engine.front.gateway.models.endpoints import ModelEndpoints
from rayloom_engine.front.gateway.models.models_file import ModelsFile
from rayloom_engine.front.gateway.models.running_models import RunningModels
from rayloom_engine.front.http.api_keys import KEYS_VARIABLE
from rayloom_engine.front.operations.admin import admin_app, load_admin_token
from rayloom_engine.front.serving import FrontServer, url_of


def run_models(config: GatewayConfig, api: socket.socket, admin: socket.socket) -> int:
    """Serves at two listening sockets until a signal ends the process. Returns the exit code. Raises ConfigError."""
    if KEYS_VARIABLE in os.environ:
        raise ConfigError(
            f"the environment variable {KEYS_VARIABLE} is set, but with models_file each model has keys of its own; "
            "unset it, and write the keys into the api_key_file of a model or alias"
        )
    assert config.gateway.models_file is not None
    file = ModelsFile(Path(config.gateway.models_file))
    document = file.read()
    tls = link_tls(config.gateway)
    admin_token = load_admin_token(config.front.admin_token_file)

    async def serve() -> None:
        models = RunningModels(config, document, api_url=url_of(api), tls=tls)
        models.file_status = file.status
        apps = (models_app(models), admin_app(models, admin_token))
        front = FrontServer(config.front, models, (apps[0], api), (apps[1], admin))
        front.run_beside(file.watch(models.apply))
        await front.run()

    collect_garbage_seldom()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def models_app(models: RunningModels) -> ApiApplication:
    """Returns the ASGI application of the API port."""
    front = models.config.front
    app = ApiApplication(front, ModelEndpoints(models).handlers, port_middleware(front, models.ring, models.lifecycle))
    app.state.service = models
    return app
