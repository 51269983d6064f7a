"""The real front over real sockets, in a thread of the test's process, with a fake core behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rayloom_engine.config import parse_config
from rayloom_engine.front.app import ApiApplication, api_app
from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.http.protocol import HttpLimits
from rayloom_engine.front.http.server import admin_server, api_server
from rayloom_engine.front.operations.admin import admin_app
from rayloom_engine.front.operations.service import FrontStart, Service, Waits
from rt_byte_model import byte_model
from rt_fake_core import TOKEN, FakeCore

MODEL = "tiny"
R = TypeVar("R")


class FrontUnderTest:
    """A running front. `core` and `service` belong to the loop of another thread: read and change them through `do`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, core: FakeCore, app: ApiApplication, api: str, admin: str
    ) -> None:
        self._loop = loop
        self.core = core
        self.kept_answers = app.state.kept_answers
        self.service: Service = app.state.service
        self.api_url = api
        self.admin_url = admin
        self.http = httpx.Client(base_url=api, timeout=60.0)
        self.admin = httpx.Client(base_url=admin, timeout=60.0)

    def do(self, action: Callable[[], R]) -> R:
        """Runs `action` in the front's loop."""

        async def run() -> R:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60.0)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, run in the front's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.do(condition):
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            time.sleep(0.005)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    @contextlib.contextmanager
    def chat_stream(self, content: str = "Hi", **fields: Any) -> Iterator[Iterator[Any]]:
        """Events of a streamed chat as they arrive: decoded documents, "[DONE]", or ": ping" for a comment."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True, **fields}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events(response)


@contextlib.contextmanager
def running_front(
    folder: Path,
    *,
    waits: Waits | None = None,
    api_keys: tuple[str, ...] | ApiKeys = (),
    limits: HttpLimits | None = None,
    ready: bool = True,
    start: int = 1,
    server_started: float | None = None,
    max_model_len: int = 512,
    rules: PoolRules | None = None,
    adapters_file: Path | None = None,
    **config: Any,
) -> Iterator[FrontUnderTest]:
    """A front with its fake core. `config`: fields of EngineConfig. Without `ready`, the core is still loading."""
    started: list[FrontUnderTest] = []
    is_started = threading.Event()
    stop: list[asyncio.Event] = []
    admin_token = Path(config["admin_token_file"]).read_text() if "admin_token_file" in config else None

    async def main() -> None:
        core = FakeCore(byte_model(folder / "model"), max_model_len=max_model_len)
        core.state = "serving" if ready else "starting"
        keys = api_keys if isinstance(api_keys, ApiKeys) else ApiKeys(api_keys)
        settings = parse_config({"served_model_name": MODEL, **config})
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]
        address = folder / "core.sock"
        service = Service(
            settings,
            {"core": CoreAddress(f"unix:{address}", TOKEN)},
            api_url=urls[0],
            waits=waits,
            start=FrontStart(start, server_started, adapters_file),
            rules=rules,
        )
        app = api_app(service, keys)
        servers = [
            api_server(app, limits),
            admin_server(admin_app(service, admin_token, adapters=service.managed_adapters)),
        ]
        tasks = [
            asyncio.create_task(core.serve(address)),
            asyncio.create_task(service.run()),
            *(
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in zip(servers, sockets, strict=True)
            ),
        ]
        started.append(FrontUnderTest(asyncio.get_running_loop(), core, app, *urls))
        stop.append(asyncio.Event())
        is_started.set()
        await stop[0].wait()
        # The tasks are cancelled, because uvicorn would need up to 0.2 s to end. It reads `should_exit` only every 0.1
        # s, and then waits for another 0.1 s.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for server in servers:
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert is_started.wait(60.0)
    front = started[0]
    try:
        front.wait_until(lambda: front.service.lifecycle.was_ready or not ready, "the front is ready")
        yield front
    finally:
        front.http.close()
        front.admin.close()
        front.do(stop[0].set)
        thread.join(60.0)


def events(response: httpx.Response) -> Iterator[Any]:
    """Decoded events of a stream in order."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            yield "[DONE]"
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
        elif line:
            yield line


def text_of(stream: list[Any], index: int = 0) -> str:
    """The text of one choice in a chat stream's events."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in stream
        if isinstance(event, dict)
        for choice in event.get("choices", ())
        if choice["index"] == index
    )
