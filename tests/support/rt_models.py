"""A gateway with several models, whose engines are fake cores, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.models.models_document import ModelsDocument, parse_models
from rayloom_engine.front.gateway.models.process import models_app
from rayloom_engine.front.gateway.models.running_models import RunningModels
from rayloom_engine.front.http.server import Server, admin_server, api_server
from rayloom_engine.front.operations.admin import admin_app
from rayloom_engine.protocol.text_files import text_files
from rt_byte_model import byte_model
from rt_engine_pool import until
from rt_fake_core import FINGERPRINT, FakeCore, say

KEY = "the key of all engines"
UNIFORM = {"targets": [{"model": "one", "weight": 50}, {"model": "two", "weight": 50}], "sticky_by": "user"}


class World:
    """A gateway with the models one, two, ... Each model's answer contains its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cores: dict[str, FakeCore] = {}
        self.places: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []
        self.models: RunningModels
        self.http: httpx.AsyncClient
        self.admin: httpx.AsyncClient

    async def add_core(self, name: str) -> None:
        core = FakeCore(byte_model(self.folder / "model"))  # all models have the same tokenizer
        assert core.model is not None
        fingerprint = msgspec.structs.replace(FINGERPRINT, content_hash=name)
        files = text_files(self.folder / "model")
        core.model = msgspec.structs.replace(core.model, fingerprint=fingerprint, text_files=files)
        core.script = say(f"I am {name}.")
        server, place = await core.listen(KEY)
        self._servers.append(server)
        self.cores[name], self.places[name] = core, place

    def document(self, aliases: dict[str, Any] | None = None, **entries: dict[str, Any]) -> ModelsDocument:
        """A document with these models. `entries`: name of a model -> further fields of its entry."""
        models = {name: {"engines": {"e": self.places[name]}, "key": KEY, **entry} for name, entry in entries.items()}
        found = parse_models({"version": "v1", "models": models, "aliases": aliases or {}})
        assert not found.problems
        return found.document

    def keys(self, name: str, *keys: str) -> str:
        path = self.folder / f"{name}.keys"
        part = path.with_suffix(".part")
        part.write_text("\n".join(keys))
        os.replace(part, path)
        return str(path)

    async def ready(self, *names: str) -> None:
        await until(lambda: all(self.models.models[name].service.lifecycle.was_ready for name in names))
        await until(lambda: all(self.models.models[name].service.client.is_core_serving for name in names))

    async def chat(self, model: str | None, key: str = "", **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= fields.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    def stop(self) -> None:
        for server in self._servers:
            server.close()


@contextlib.asynccontextmanager
async def running(
    folder: Path, names: str, make: Callable[[World], ModelsDocument], **settings: object
) -> AsyncIterator[World]:
    """Yields the world of a gateway. `settings`: further settings of the gateway."""
    world = World(folder)
    for name in names.split():
        await world.add_core(name)
    config = parse_gateway_config({"models_file": "/m", "cache_dir": str(folder / "cache"), "ui": True, **settings})
    world.models = RunningModels(config, make(world), api_url="http://none")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    servers: list[Server] = [api_server(models_app(world.models)), admin_server(admin_app(world.models, None))]
    serving = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    task = asyncio.create_task(world.models.run())
    async with (
        httpx.AsyncClient(base_url=urls[0], timeout=60.0) as world.http,
        httpx.AsyncClient(base_url=urls[1], timeout=60.0) as world.admin,
    ):
        try:
            yield world
        finally:
            for server in servers:
                server.should_exit = server.force_exit = True
            await asyncio.wait(serving)
            task.cancel()
            await asyncio.wait([task])
            world.stop()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def refusal(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]
