"""The front as a process of its own, which connects to a fake core in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from rayloom_engine.config import parse_config
from rt_byte_model import byte_model
from rt_fake_core import TOKEN, FakeCore
from rt_forks import ForkedFront
from rt_front import MODEL, events


class FrontProcess:
    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedFront,
        url: str,
        admin_url: str,
        core: FakeCore,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.process = process
        self.url = url
        self.admin_url = admin_url
        self.core = core
        self._loop = loop

    def do(self, action: Callable[[], Any]) -> Any:
        """Runs `action` in the core's loop."""

        async def run() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60.0)

    @contextlib.contextmanager
    def chat_stream(self) -> Iterator[Iterator[Any]]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60.0) as response:
            yield events(response)

    def is_refusing(self) -> bool:
        return httpx.get(f"{self.url}/ready").status_code == 503


@contextlib.contextmanager
def front_process(folder: Path, *, max_files: int | None = None, **config: Any) -> Iterator[FrontProcess]:
    """A front process that is ready, with a fake core that stops every answer after 5 tokens.

    `max_files`: limit of the front's open files; None: the same limit as this process.
    """
    core = FakeCore(byte_model(folder / "model"))
    core.hold_after = 5
    address = folder / "core.sock"
    running: list[asyncio.Task[None]] = []
    is_running = threading.Event()

    async def serve() -> None:
        running.append(asyncio.create_task(core.serve(address)))
        is_running.set()
        await asyncio.wait(running)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert is_running.wait(30.0)
    loop = running[0].get_loop()
    process: subprocess.Popen[bytes] | ForkedFront
    if max_files is None:
        process, url, admin_url = _fork(folder, f"unix:{address}", **config)
    else:
        process, url, admin_url = start(folder, f"unix:{address}", max_files, **config)
    front = FrontProcess(process, url, admin_url, core, loop)
    try:
        wait_until(lambda: _is_ready(front), "the front is ready")
        yield front
    finally:
        process.kill()
        process.wait(30.0)
        loop.call_soon_threadsafe(running[0].cancel)
        thread.join(30.0)


def start(
    folder: Path, core_address: str, max_files: int | None = None, **config: Any
) -> tuple[subprocess.Popen[bytes], str, str]:
    """Starts a front as the supervisor does. Returns the process and the URLs of its API and its admin port."""
    arguments = _arguments(folder, core_address, config)
    api, admin = _listeners()
    with api, admin:
        fds = (api.fileno(), admin.fileno())
        command = [sys.executable, "-m", "rayloom_engine.front", *arguments, "--parent", str(os.getpid())]
        command += ["--api-fd", str(fds[0]), "--admin-fd", str(fds[1])]

        def bound_files() -> None:
            if max_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

        process = subprocess.Popen(command, pass_fds=fds, preexec_fn=bound_files)
        return process, _url(api), _url(admin)


def _fork(folder: Path, core_address: str, **config: Any) -> tuple[ForkedFront, str, str]:
    """Like `start`, but as a fork, which saves a second for imports."""
    arguments = _arguments(folder, core_address, config)
    api, admin = _listeners()
    with api, admin:
        return ForkedFront(arguments, (api, admin)), _url(api), _url(admin)


def _arguments(folder: Path, core_address: str, config: dict[str, Any]) -> list[str]:
    (folder / "token").write_text(TOKEN)
    (folder / "config.json").write_text(parse_config({"served_model_name": MODEL, **config}).model_dump_json())
    return ["--run-dir", str(folder), "--core-address", core_address]


def _listeners() -> tuple[socket.socket, socket.socket]:
    return socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _is_ready(front: FrontProcess) -> bool:
    assert front.process.poll() is None, "the front ended"
    return httpx.get(f"{front.url}/ready", timeout=60.0).status_code == 200


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)
