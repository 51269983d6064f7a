"""A plugin for pytest that runs the tests of llama.cpp's server against another server.

The tests are not changed. Their class ServerProcess starts the server that PEER_TESTS_SERVER names, with the weights of
SmolLM2-135M: our server reads the checkpoint PEER_TESTS_WEIGHTS, and llama.cpp's server the GGUF file PEER_TESTS_GGUF.
If a test names a file with a chat template, our server uses it. Requests to our server get the paths and the model's
name of OpenAI's API, as in `translation`; a test of a native path of llama.cpp is skipped.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from peer_tests.common import recorder
from peer_tests.llama_cpp_suite.translation import our_body, our_path

RAYLOOM = "rayloom"
START_SECONDS = 600
MAX_MODEL_LEN = 8192
NO_ENGINE = "needs another kind of model"


def our_command(engine: str, weights: str, server: Any, folder: str) -> list[str]:
    """Returns the command that starts our server with those settings of a ServerProcess that our server knows."""
    slots = server.n_slots or 1
    context = min(MAX_MODEL_LEN, (server.n_ctx or MAX_MODEL_LEN) // (1 if server.kv_unified else slots))
    if server.chat_template_file:
        weights = str(with_template(Path(weights), Path(server.chat_template_file), Path(folder)))
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


def with_template(weights: Path, template: Path, parent: Path) -> Path:
    """Returns a folder below `parent` with links to the files of `weights`, and with another chat template."""
    folder = parent / template.stem
    folder.mkdir(exist_ok=True)
    for path in weights.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    shutil.copyfile(template, folder / "chat_template.jinja")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replaces the package `wget`: the conftest imports it, and only downloads of models use it."""
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
        openai.OpenAI.post = _with_model(openai.OpenAI.post)
    else:
        process.start = _start_theirs(process.start)


def _require_text_model(server: Any) -> None:
    if server.server_embeddings or server.server_reranking or server.mmproj_url or server.lora_files:
        pytest.skip(NO_ENGINE)


class _Running:
    """Our last server. It keeps running, because consecutive tests often have the same settings."""

    command: ClassVar[list[str]] = []
    process: ClassVar[subprocess.Popen[bytes] | None] = None


def _start_ours(self: Any, timeout_seconds: int = START_SECONDS) -> None:
    _require_text_model(self)
    command = our_command(os.environ["PEER_TESTS_ENGINE"], os.environ["PEER_TESTS_WEIGHTS"], self, _files_folder())
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
def _files_folder() -> str:
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
    return ours, our_body(server, ours, data)


def _request(request: Any) -> Any:
    def translated(self: Any, method: str, path: str, data: Any = None, *others: Any, **more: Any) -> Any:
        path, data = _translated(self, path, data)
        answer = request(self, method, path, data, *others, **more)
        ids = answer.body.get("prompt_token_ids") if self.debug and isinstance(answer.body, dict) else None
        if ids:
            text = request(self, "POST", "/detokenize", {"tokens": ids}).body["prompt"]
            answer.body["__verbose"] = {"prompt": text}
        return answer

    return translated


def _stream(request: Any) -> Any:
    def translated(self: Any, method: str, path: str, data: Any = None, *others: Any, **more: Any) -> Iterator[Any]:
        path, data = _translated(self, path, data)
        yield from request(self, method, path, data, *others, **more)

    return translated


def _with_prefix(init: Any) -> Any:
    """Adds the prefix /v1 of the API to the clients' base URL. llama.cpp's server does not need it."""

    def initialised(self: Any, *, base_url: str, **more: Any) -> None:
        init(self, base_url=base_url if base_url.endswith("/v1") else f"{base_url}/v1", **more)

    return initialised


def _with_model(post: Any) -> Any:
    """Sets our model's name in requests of OpenAI's library. llama.cpp's server does not check the name."""

    def posted(self: Any, path: str, *, body: Any = None, **more: Any) -> Any:
        name = _Running.command[_Running.command.index("--served-model-name") + 1]
        return post(self, path, body={**body, "model": name}, **more)

    return posted
