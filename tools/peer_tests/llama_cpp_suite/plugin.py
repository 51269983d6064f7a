"""A plugin for pytest that runs the tests of llama.cpp's server against another server.

The tests stay as they are. Their class ServerProcess starts the server that PEER_TESTS_SERVER names, with the weights
of SmolLM2-135M: ours from the checkpoint PEER_TESTS_WEIGHTS, llama.cpp's from the GGUF file PEER_TESTS_GGUF. Requests
to our server get the paths and the model's name of OpenAI's API; a test of a native path of llama.cpp is skipped.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from peer_tests.common import recorder

RAYLOOM = "rayloom"
START_SECONDS = 600
MAX_MODEL_LEN = 8192
NO_ENGINE = "needs another kind of model"

# Paths without the prefix of OpenAI's API -> the same paths with it.
_ALIASES = {"/chat/completions": "/v1/chat/completions", "/responses": "/v1/responses", "/models": "/v1/models"}
_SHARED = ("/v1/", "/health", "/metrics")
_NOT_SHARED = ("/v1/stream",)


def our_path(path: str) -> str | None:
    """Returns the path on our server; None for the paths of llama.cpp's own API."""
    path = _ALIASES.get(path, path)
    return path if path.startswith(_SHARED) and not path.startswith(_NOT_SHARED) else None


def our_command(engine: str, weights: str, server: Any, folder: str) -> list[str]:
    """Returns the command that starts our server with those settings of a ServerProcess that our server has."""
    slots = server.n_slots or 1
    context = min(MAX_MODEL_LEN, (server.n_ctx or MAX_MODEL_LEN) // (1 if server.kv_unified else slots))
    command = [engine, "serve", "--model", weights, "--dtype", "float32", "--threads", "2", "--admin-port", "0"]
    command += ["--host", server.server_host, "--port", str(server.server_port)]
    command += ["--served-model-name", server.model_alias or "model", "--max-model-len", str(context)]
    command += ["--max-num-seqs", str(slots)]
    if server.api_key:
        path = os.path.join(folder, "api-keys")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{server.api_key}\n")
        command += ["--api-key-file", path]
    return command


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replaces a package that the conftest's imports need, and that only downloads of models use."""
    sys.modules["wget"] = types.ModuleType("wget")


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    for marker in ("slow", "serial"):
        config.addinivalue_line("markers", marker)
    utils: Any = importlib.import_module("utils")
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    process = utils.ServerProcess
    if os.environ["PEER_TESTS_SERVER"] == RAYLOOM:
        process.start = _start_ours
        process.make_request = _request(process.make_request)
        process.make_stream_request = _stream(process.make_stream_request)
        openai: Any = importlib.import_module("openai")
        openai.OpenAI.__init__ = _with_prefix(openai.OpenAI.__init__)
    else:
        process.start = _start_theirs(process.start)


def _require_text_model(server: Any) -> None:
    if server.server_embeddings or server.server_reranking or server.mmproj_url or server.lora_files:
        pytest.skip(NO_ENGINE)


class _Running:
    """Our last server, kept because several tests in a row have the same settings, and a start takes seconds."""

    command: ClassVar[list[str]] = []
    process: ClassVar[subprocess.Popen[bytes] | None] = None


def _start_ours(self: Any, timeout_seconds: int = START_SECONDS) -> None:
    _require_text_model(self)
    command = our_command(os.environ["PEER_TESTS_ENGINE"], os.environ["PEER_TESTS_WEIGHTS"], self, _keys_folder())
    recorder.mark_served()
    if command != _Running.command or _Running.process is None or _Running.process.poll() is not None:
        if _Running.process is not None:
            _Running.process.terminate()
            _Running.process.wait()
        print("starts:", " ".join(command), flush=True)
        _Running.process = subprocess.Popen(command, start_new_session=True)
        _Running.command = command
        recorder.add_server(_Running.process.pid)
        recorder.wait_until_ready(f"http://{self.server_host}:{self.server_port}/health", _Running.process)
    self.ready = True


@functools.cache
def _keys_folder() -> str:
    return tempfile.mkdtemp(prefix="peer-tests-")


def _start_theirs(start: Any) -> Any:
    def started(self: Any, timeout_seconds: int = START_SECONDS) -> None:
        _require_text_model(self)
        self.model_hf_repo = None
        self.model_hf_file = None
        self.model_file = os.environ["PEER_TESTS_GGUF"]
        self.offline = False
        recorder.mark_served()
        start(self, timeout_seconds=START_SECONDS)

    return started


def _translated(server: Any, path: str, data: Any) -> tuple[str, Any]:
    """Returns path and body for our server. Skips the test if the path belongs to llama.cpp alone."""
    ours = our_path(path)
    if ours is None:
        pytest.skip(f"llama.cpp's own API: {path.split('?', 1)[0]}")
    if isinstance(data, dict):
        # The server of the tests has one model, and a default length of answers.
        data = {**data, "model": server.model_alias or "model"}
        if server.n_predict and ours in ("/v1/completions", "/v1/chat/completions"):
            data.setdefault("max_tokens", data.get("max_completion_tokens", server.n_predict))
    return ours, data


def _request(request: Any) -> Any:
    def translated(self: Any, method: str, path: str, data: Any = None, *others: Any, **more: Any) -> Any:
        path, data = _translated(self, path, data)
        return request(self, method, path, data, *others, **more)

    return translated


def _stream(request: Any) -> Any:
    def translated(self: Any, method: str, path: str, data: Any = None, *others: Any, **more: Any) -> Iterator[Any]:
        path, data = _translated(self, path, data)
        yield from request(self, method, path, data, *others, **more)

    return translated


def _with_prefix(init: Any) -> Any:
    """Gives clients the prefix of the API, which llama.cpp does not need."""

    def initialised(self: Any, *, base_url: str, **more: Any) -> None:
        init(self, base_url=base_url if base_url.endswith("/v1") else f"{base_url}/v1", **more)

    return initialised
