"""A plugin for pytest that runs vLLM's tests against another server. It runs inside vLLM's environment.

The tests stay as they are. Their class RemoteOpenAIServer starts the server that PEER_TESTS_SERVER names, always with
the weights of SmolLM2-135M in float32, under the model name that the test asks for. Their tokenizers come from the same
checkpoint. Results are appended to the file PEER_TESTS_RESULTS, one JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

RAYLOOM = "rayloom"
MAX_MODEL_LEN = 8192

# Flags of the tests that change what clients see -> whether a value follows.
_KEPT = {
    "--max-num-seqs": True,
    "--max-model-len": True,
    "--root-path": True,
    "--api-key": True,
    "--reasoning-parser": True,
    "--tool-call-parser": True,
    "--enable-auto-tool-choice": False,
    "--enable-prompt-tokens-details": False,
    "--enable-force-include-usage": False,
    "--enable-tokenizer-info-endpoint": False,
    "--enable-server-load-tracking": False,
    "--return-tokens-as-token-ids": False,
    "--max-logprobs": True,
    "--generation-config": True,
    "--host": True,
    "--port": True,
    "--seed": True,
    "--uds": True,
}
# The same flags by their names here. A flag that is missing below has no effect on our server: what it switches on is
# always on, or the setting does not exist.
_OURS = {
    "--max-num-seqs": "--max-num-seqs",
    "--max-model-len": "--max-model-len",
    "--root-path": "--root-path",
    "--tool-call-parser": "--tool-parser",
    "--reasoning-parser": "--reasoning-parser",
    "--generation-config": "--generation-config",
    "--max-logprobs": "--max-logprobs",
    "--enable-force-include-usage": "--enable-force-include-usage",
    "--host": "--host",
    "--port": "--port",
}

# Variables that are meant for vLLM's own process.
_NOT_OURS = ("LD_PRELOAD", "PYTHONPATH", "VLLM_CPU_OMP_THREADS_BIND")

_FILES_WITH_SERVER: set[str] = set()  # files of tests during which a server was started


def kept_flags(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Returns the flags of a test's command line that any server can take, with their values."""
    flags: list[tuple[str, str | None]] = []
    words = [word for argument in arguments for word in argument.split("=", 1)]
    index = 0
    while index < len(words):
        name = words[index]
        index += 1
        if name not in _KEPT:
            continue
        value = words[index] if _KEPT[name] else None
        if name == "--max-model-len" and value is not None:
            value = str(min(int(value), MAX_MODEL_LEN))
        flags.append((name, value))
    return flags


def our_command(engine: str, model_name: str, arguments: Sequence[str], folder: str) -> list[str]:
    """Returns the command that starts our server. API keys are written into a file in `folder`."""
    command = [engine, "serve", "--model", "builtin://smollm2-135m", "--dtype", "float32", "--threads", "2"]
    command += ["--served-model-name", model_name, "--admin-port", "0"]
    keys = []
    for name, value in kept_flags(arguments):
        if name == "--api-key" and value is not None:
            keys.append(value)
        elif name in _OURS:
            command += [_OURS[name]] if value is None else [_OURS[name], value]
    if keys:
        path = os.path.join(folder, "api-keys")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(keys) + "\n")
        command += ["--api-key-file", path]
    return command


def vllm_command(weights: str, model_name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts vLLM with the same weights."""
    command = ["vllm", "serve", weights, "--served-model-name", model_name, "--dtype", "float32"]
    for name, value in kept_flags(arguments):
        command += [name] if value is None else [name, value]
    return command


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    # These modules exist only in vLLM's environment.
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("vllm.tokenizers")
    utils: Any = importlib.import_module("tests.utils")

    weights = os.environ["PEER_TESTS_WEIGHTS"]

    def start(self: Any, model: str, arguments: list[str], variables: Mapping[str, str] | None) -> None:
        _FILES_WITH_SERVER.add(os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[0])
        server = os.environ["PEER_TESTS_SERVER"]
        environment = {**os.environ, **(variables or {})}
        if server == RAYLOOM:
            environment = {name: value for name, value in environment.items() if name not in _NOT_OURS}
            folder = tempfile.mkdtemp(prefix="peer-tests-")
            keys = [f"--api-key={environment['VLLM_API_KEY']}"] if "VLLM_API_KEY" in environment else []
            command = our_command(os.environ["PEER_TESTS_ENGINE"], model, [*arguments, *keys], folder)
        else:
            command = vllm_command(weights, model, arguments)
        print("starts:", " ".join(command), flush=True)
        self.proc = subprocess.Popen(command, env=environment, start_new_session=True)

    utils.RemoteVLLMServer._pre_download_model = lambda self, model, args: None
    utils.RemoteOpenAIServer._start_server = start
    tokenizer_of = tokenizers.get_tokenizer
    from_pretrained = transformers.AutoTokenizer.from_pretrained
    tokenizers.get_tokenizer = lambda *args, **more: tokenizer_of(weights)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **more: from_pretrained(weights)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, Any]:
    """Writes the result of a test that uses a server. Others compute in this process and say nothing about a server."""
    report = yield
    # A fixture of a wider scope may have started the server while another file ran.
    has_fixture = any("Server" in type(value).__name__ for value in getattr(item, "funcargs", {}).values())
    is_served = has_fixture or item.nodeid.split("::", 1)[0] in _FILES_WITH_SERVER
    if is_served and (report.when == "call" or report.outcome != "passed"):
        _write(report.nodeid, report.when, report.outcome, report.longrepr)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "collect", "failed", report.longrepr)


def _write(test: str, when: str, outcome: str, cause: object) -> None:
    message = "" if cause is None else "\n".join(str(cause).strip().splitlines()[-6:])[-1000:]
    line = {"test": test, "when": when, "outcome": outcome, "message": message}
    with open(os.environ["PEER_TESTS_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
