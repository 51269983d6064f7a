"""A plugin for pytest that runs vLLM's tests against another server. It runs inside vLLM's environment.

The tests are not changed. Their class RemoteOpenAIServer starts the server that PEER_TESTS_SERVER names, always with
the checkpoint PEER_TESTS_WEIGHTS in float32. The served name is the name of the model that the test wants. The tests'
tokenizers are loaded from the same checkpoint.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from peer_tests.common import recorder

RAYLOOM = "rayloom"
MAX_MODEL_LEN = 8192

_NAME = "--served-model-name"
# Flags of the tests that change answers to clients -> True if a value follows the flag.
_KEPT = {
    _NAME: True,
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
# The names of these flags on our server. A flag that is missing here has no effect on our server: the feature is always
# on, or the setting does not exist.
_OURS = {
    "--max-num-seqs": "--max-num-seqs",
    "--max-model-len": "--max-model-len",
    "--root-path": "--root-path",
    "--tool-call-parser": "--tool-parser",
    "--reasoning-parser": "--reasoning-parser",
    "--generation-config": "--generation-config",
    "--max-logprobs": "--max-logprobs",
    "--enable-force-include-usage": "--enable-force-include-usage",
    "--return-tokens-as-token-ids": "--return-tokens-as-token-ids",
    "--host": "--host",
    "--port": "--port",
}

# Variables that are meant for vLLM's own process.
_NOT_OURS = ("LD_PRELOAD", "PYTHONPATH", "VLLM_CPU_OMP_THREADS_BIND")


def kept_flags(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Returns the flags of a test's command line that have a meaning for any server, with their values."""
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


def served_name(model: str, arguments: Sequence[str]) -> str:
    """Returns the model's name in the API: the value of --served-model-name, else the model that the test names."""
    return next((value for name, value in kept_flags(arguments) if name == _NAME and value is not None), model)


def our_command(engine: str, weights: str, model: str, arguments: Sequence[str], folder: str) -> list[str]:
    """Returns the command that starts our server. API keys are written into a file in `folder`."""
    command = [engine, "serve", "--model", weights, "--dtype", "float32", "--threads", "2"]
    command += [_NAME, served_name(model, arguments), "--admin-port", "0"]
    command += ["--metrics-prefix", "vllm"]  # the flag for users who keep vLLM's dashboards
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


def vllm_command(weights: str, model: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts vLLM with the same weights. Compiled graphs would cost minutes at each start."""
    name_of_model = served_name(model, arguments)
    command = ["vllm", "serve", weights, _NAME, name_of_model, "--dtype", "float32", "--enforce-eager"]
    for name, value in kept_flags(arguments):
        if name != _NAME:
            command += [name] if value is None else [name, value]
    return command


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    # These modules exist only in vLLM's environment.
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("vllm.tokenizers")
    utils: Any = importlib.import_module("tests.utils")

    loader: Any = importlib.import_module("vllm.model_executor.model_loader.weight_utils")

    weights = os.environ["PEER_TESTS_WEIGHTS"]
    loader.download_weights_from_hf = lambda *args, **more: weights
    # Tests compute the size of the vocabulary from the settings of a model that is not here.
    settings: Any = importlib.import_module("vllm.config").ModelConfig
    init = settings.__init__
    # Only __init__ is replaced and not the class, because tests make mocks of the class.
    settings.__init__ = lambda self, *args, model=None, **more: init(self, *args, model=weights, **more)
    # Fixtures that download a model or an adapter get the checkpoint instead.
    hub: Any = importlib.import_module("huggingface_hub")
    hub.HfApi.snapshot_download = lambda *args, **more: weights

    def start(self: Any, model: str, arguments: list[str], variables: Mapping[str, str] | None) -> None:
        server = os.environ["PEER_TESTS_SERVER"]
        environment = {**os.environ, **(variables or {})}
        if server == RAYLOOM:
            environment = {name: value for name, value in environment.items() if name not in _NOT_OURS}
            folder = tempfile.mkdtemp(prefix="peer-tests-")
            keys = [f"--api-key={environment['VLLM_API_KEY']}"] if "VLLM_API_KEY" in environment else []
            command = our_command(os.environ["PEER_TESTS_ENGINE"], weights, model, [*arguments, *keys], folder)
        else:
            command = vllm_command(weights, model, arguments)
        print("starts:", " ".join(command), flush=True)
        self.proc = subprocess.Popen(command, env=environment, start_new_session=True)
        recorder.add_server(self.proc.pid)

    wait = utils.RemoteVLLMServer._wait_for_server

    def wait_long(self: Any, *, url: str, timeout: float) -> None:
        wait(self, url=url, timeout=recorder.START_SECONDS)

    utils.RemoteVLLMServer._pre_download_model = lambda self, model, args: None
    utils.RemoteVLLMServer._wait_for_server = wait_long
    utils.RemoteOpenAIServer._start_server = start
    tokenizer_of = tokenizers.get_tokenizer
    from_pretrained = transformers.AutoTokenizer.from_pretrained
    tokenizers.get_tokenizer = lambda *args, **more: tokenizer_of(weights)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **more: from_pretrained(weights)
