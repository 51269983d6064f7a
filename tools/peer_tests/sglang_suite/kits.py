"""SGLang's checks as tests for pytest. The variable PEER_TESTS_SGLANG names SGLang's folder.

SGLang's own test files start its server on a GPU and call these checks. Here our server runs instead. The modules are
loaded unchanged, but the names that they import from SGLang's engine are replaced. Our server and vLLM return the
reason of a stop as `stop_reason`; here it is renamed to SGLang's `matched_stop`.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer_tests.common import recorder

MODEL = "smollm2"
_FOLDER = Path(os.environ["PEER_TESTS_SGLANG"]) / "sglang" / "test"
_ENGINE_NAMES = {
    "sglang.srt.utils": ("kill_process_tree",),
    "sglang.test.test_utils": (
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH",
        "DEFAULT_URL_FOR_TEST",
        "ModelLaunchSettings",
        "popen_launch_server",
    ),
}


def _load() -> tuple[Any, Any, Any]:
    """Returns the modules with the checks of tools, of stops, and of JSON."""
    for name in ("sglang", "sglang.srt", "sglang.test", "sglang.test.kits"):
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    sys.modules["sglang.test"].__path__ = [str(_FOLDER)]
    sys.modules["sglang.test.kits"].__path__ = [str(_FOLDER / "kits")]
    for name, attributes in _ENGINE_NAMES.items():
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules[name] = module
    names = ("tool_call_test_runner", "kits.matched_stop_kit", "kits.json_constrained_kit")
    tools, stops, structured = (importlib.import_module(f"sglang.test.{name}") for name in names)
    return tools, stops, structured


_TOOLS, _STOPS, _JSON = _load()
_StopChecks: Any = _STOPS.MatchedStopMixin
_JsonChecks: Any = _JSON.JSONConstrainedMixin


def _post(url: str, json: Any) -> Any:
    """Returns the answer to a request with SGLang's name for the reason of a stop."""
    document = _HTTP.post(url, json=json).json()
    for choice in document.get("choices", ()):
        choice["matched_stop"] = choice["stop_reason"]
    return types.SimpleNamespace(json=lambda: document)


_HTTP: Any = _STOPS.requests
_STOPS.requests = types.SimpleNamespace(post=_post)


@pytest.fixture(scope="module", autouse=True)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of our server, which runs during the tests of the whole module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["PEER_TESTS_ENGINE"], "serve", "--model", os.environ["PEER_TESTS_WEIGHTS"]]
    command += ["--dtype", "float32", "--threads", "2", "--admin-port", "0", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--tool-parser", "hermes", "--max-model-len", "8192"]
    process = subprocess.Popen(command, start_new_session=True)
    recorder.add_server(process.pid)
    url = f"http://127.0.0.1:{port}"
    recorder.wait_until_ready(f"{url}/health", process)
    for case in (TestMatchedStop, TestJson):
        case.base_url = url
        case.model = MODEL
    yield url
    process.terminate()
    process.wait()


@pytest.mark.parametrize("name", [name for name, _, _ in _TOOLS._TESTS])
def test_tool_calls(server_url: str, name: str) -> None:
    openai: Any = importlib.import_module("openai")
    check = next(check for each, check, _ in _TOOLS._TESTS if each == name)
    check(openai.Client(api_key="sk-test", base_url=f"{server_url}/v1"), MODEL)


class TestMatchedStop(_StopChecks, unittest.TestCase):  # type: ignore[misc]
    base_url = ""
    model = ""


class TestJson(_JsonChecks, unittest.TestCase):  # type: ignore[misc]
    base_url = ""
    model = ""
