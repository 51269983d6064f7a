"""Debian's chromium without a window, driven by the DevTools protocol over a pair of pipes.

A page records every error and warning of the browser's console, and every address that the page requests.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPLY_S = 60.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # the tests run as root in containers, and chromium refuses its sandbox there
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--window-size=1100,760",
)
# This script runs before the page's own script. The page cannot remove the listener.
_WATCH_POLICY = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI}`);
});
"""


def find_chromium() -> str | None:
    """The path of chromium; None if this machine has none."""
    return shutil.which("chromium") or shutil.which("chromium-headless-shell")


class Page:
    """One tab of the browser. Its methods are synchronous; while a method waits, events are recorded."""

    def __init__(self, process: subprocess.Popen[bytes], write_end: int, messages: queue.Queue[dict[str, Any]]) -> None:
        self._process = process
        self._write_end = write_end
        self._messages = messages
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []  # errors and warnings of the console, exceptions, violations of the policy
        self.requested: list[str] = []  # addresses
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.before_load(_WATCH_POLICY)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools method. Fails with the browser's message if the browser refuses the method."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + REPLY_S
        while True:
            try:
                answer = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no answer to {method}; chromium's exit code: {self._process.poll()}") from None
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def before_load(self, script: str) -> None:
        """Runs `script` before the scripts of every document that is opened from now on."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        """Opens `url`, and returns once its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30.0) -> None:
        """Returns once the JavaScript expression `condition` is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"waited in vain for {condition}:\n{self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches `selector`."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def fill(self, selector: str, text: str) -> None:
        """Replaces the text of a field by typing `text`."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses and releases a key in the focused element."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Clicks on the middle of an element. If another element covers it, that other element gets the click."""
        middle = (
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        x, y = self.evaluate(middle)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextlib.contextmanager
def browser_page(folder: Path, chromium: str) -> Iterator[Page]:
    """A tab of a new browser. The browser writes its files into `folder`, and ends with the block."""
    command_read, command_write = _pipe()
    answer_read, answer_write = _pipe()
    # Chromium reads commands from file descriptor 3 and writes answers to 4.
    script = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, chromium, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(command_read, answer_write),
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(command_read)
    os.close(answer_write)
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    reader = threading.Thread(target=_read, args=(answer_read, messages), daemon=True)
    reader.start()
    try:
        yield Page(process, command_write, messages)
    finally:
        os.close(command_write)  # chromium ends when the pipe is closed
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10.0)
        os.close(answer_read)


def _pipe() -> tuple[int, int]:
    """A pipe with file descriptors from 10 on. The shell redirects smaller ones."""
    made = os.pipe()
    read_end, write_end = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in made)
    for end in made:
        os.close(end)
    return read_end, write_end


def _read(pipe: int, messages: queue.Queue[dict[str, Any]]) -> None:
    """Puts the messages of the pipe into the queue. Each message ends with a zero byte."""
    held = b""
    while data := os.read(pipe, 65536):
        *whole, held = (held + data).split(b"\0")
        for message in whole:
            messages.put(json.loads(message))
