"""The front as a process of its own: signals and drain. The core is a fake one in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.process import EXIT_CONFIG
from rt_byte_model import byte_model
from rt_fake_core import TOKEN, FakeCore
from rt_front import MODEL, events, text_of


class FrontProcess:
    def __init__(
        self, process: subprocess.Popen[bytes], url: str, core: FakeCore, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.process = process
        self.url = url
        self.core = core
        self._loop = loop

    def do(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the core's loop."""

        async def run() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20.0)

    @contextlib.contextmanager
    def chat_stream(self) -> Iterator[Iterator[Any]]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=20.0) as response:
            yield events(response)

    def is_refusing(self) -> bool:
        return httpx.get(f"{self.url}/ready").status_code == 503


@contextlib.contextmanager
def front_process(folder: Path, **config: Any) -> Iterator[FrontProcess]:
    """A front process that is ready, with a fake core that holds every answer back after 5 tokens."""
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
    assert is_running.wait(10.0)
    loop = running[0].get_loop()
    process, url = start(folder, f"unix:{address}", **config)
    front = FrontProcess(process, url, core, loop)
    try:
        wait_until(lambda: _is_ready(front), "the front is ready")
        yield front
    finally:
        process.kill()
        process.wait(10.0)
        loop.call_soon_threadsafe(running[0].cancel)
        thread.join(10.0)


def start(folder: Path, core_address: str, **config: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a front as the supervisor does. Returns the process and its API's URL."""
    (folder / "token").write_text(TOKEN)
    (folder / "config.json").write_text(parse_config({"served_model_name": MODEL, **config}).model_dump_json())
    api, admin = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with api, admin:
        fds = (api.fileno(), admin.fileno())
        command = [sys.executable, "-m", "rayloom_engine.front", "--run-dir", str(folder), "--parent", str(os.getpid())]
        command += ["--core-address", core_address, "--api-fd", str(fds[0]), "--admin-fd", str(fds[1])]
        return subprocess.Popen(command, pass_fds=fds), f"http://127.0.0.1:{api.getsockname()[1]}"


def _is_ready(front: FrontProcess) -> bool:
    assert front.process.poll() is None, "the front ended"
    return httpx.get(f"{front.url}/ready", timeout=30.0).status_code == 200


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signal.SIGTERM)
            wait_until(front.is_refusing, "the front drains")
            front.do(front.core.release)
            received += list(stream)
        assert text_of(received) == "Hello there."
        assert received[-1] == "[DONE]"
        assert front.process.wait(10.0) == 0


def test_what_does_not_finish_in_time_gets_an_error_event(tmp_path: Path) -> None:
    with front_process(tmp_path, drain_seconds=0.1) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signal.SIGTERM)
            received += list(stream)
        assert "stopped" in received[-1]["error"]["message"]
        assert front.process.wait(10.0) == 0


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["SIGINT", "SIGTERM twice"]
)
def test_a_hard_stop_does_not_wait(tmp_path: Path, signals: list[signal.Signals]) -> None:
    with front_process(tmp_path) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signals[0])
            for number in signals[1:]:
                wait_until(front.is_refusing, "the first signal was taken")
                front.process.send_signal(number)
            received += list(stream)
        assert "stopped" in received[-1]["error"]["message"]
        assert front.process.wait(10.0) == 0


def test_a_bad_key_file_ends_the_process_with_the_code_for_bad_settings(tmp_path: Path) -> None:
    process, _url = start(tmp_path, f"unix:{tmp_path}/core.sock", api_key_file=str(tmp_path / "none"))
    assert process.wait(30.0) == EXIT_CONFIG
