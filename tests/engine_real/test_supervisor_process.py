"""The whole server as a process: its end by signals, and its end when it gives up. A tiny model makes starts fast.

test_tensor_parallel.py tests hard stops of several ranks. test_core_death.py (executor uni) and test_rank_death.py (mp,
ray) kill the supervisor of servers that other tests have used, and test the end of these servers.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rt_server import RunningServer, Stream, files_with_copies, running_server, wait_until
from rt_tiny import tiny_checkpoint, tiny_tokenizer
from rt_torch_users import users_of_torch

# The time that a process needs to end depends on the machine's load. This limit only bounds the time of a failing test.
ENDS_S = 60.0
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096, num_hidden_layers=4)
    return str(tiny_tokenizer(folder))


def _serve(tmp_path: Path, model: str, *arguments: str):
    return running_server(
        tmp_path, "--model", model, "--served-model-name", "tiny", "--num-kv-blocks", "300", *arguments
    )


def _stream(server: RunningServer, body: dict) -> tuple[Stream, threading.Thread]:
    stream = Stream()
    thread = threading.Thread(target=stream.run, args=(server.api_url, body), daemon=True)
    thread.start()
    wait_until(lambda: bool(stream.tokens), ENDS_S, lambda: f"no token; {stream.failure}")
    return stream, thread


def _family(server: RunningServer) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]


def test_sigterm_lets_a_stream_finish_and_ends_with_0_and_no_process_imported_torch_in_bfloat16(
    tmp_path: Path, model: str
) -> None:
    with _serve(tmp_path, model, "--dtype", "bfloat16", "--kv-host-memory-bytes", str(1 << 20)) as server:
        family = _family(server)
        files = files_with_copies(server)
        assert server.status()["model"]["compute_dtype"] == "bfloat16"
        assert users_of_torch(server) == []
        stream, thread = _stream(server, {**BODY, "max_tokens": 600})
        server.process.send_signal(signal.SIGTERM)
        thread.join(120.0)
        assert (stream.failure, len(stream.tokens), stream.finish_reason) == (None, 600, "length")
        assert server.process.wait(ENDS_S) == 0
        assert not any(file.exists() for file in files), "the server has left its copies of KV blocks behind"
        assert psutil.wait_procs(family, timeout=ENDS_S)[1] == []


def test_a_front_that_dies_while_it_drains_is_not_started_again(tmp_path: Path, model: str) -> None:
    with _serve(tmp_path, model) as server:
        family = _family(server)
        front = server.children()["front"]
        _stream(server, {**BODY, "max_tokens": 4000})
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining for at most" in server.log_text(), ENDS_S, server.log_text)
        front.kill()
        assert server.process.wait(ENDS_S) == 0
        assert psutil.wait_procs(family, timeout=ENDS_S)[1] == []
        assert "front died (signal SIGKILL) while it drained" in server.log_text()


@pytest.mark.slow  # test_tensor_parallel.py stops a server of four ranks in the same way
def test_a_hard_stop_ends_everything_and_no_stream_is_finished_first(
    tmp_path: Path, model: str, measured: Callable[[str], None]
) -> None:
    with _serve(tmp_path, model) as server:
        family = _family(server)
        stream, thread = _stream(server, {**BODY, "max_tokens": 4000})
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(ENDS_S) == 0
        assert psutil.wait_procs(family, timeout=ENDS_S)[1] == []
        measured(f"all processes ended {time.monotonic() - started:.2f} s after the signal")
        thread.join(ENDS_S)
        assert stream.failure is not None, f"the stream was finished, with {len(stream.tokens)} tokens"


def test_a_core_that_keeps_dying_uses_up_the_budget_and_ends_the_server(tmp_path: Path, model: str) -> None:
    with _serve(tmp_path, model, "--restart-budget", "1") as server:
        first = server.children()["core"].pid
        server.children()["core"].kill()
        wait_until(
            lambda: server.children().get("core", psutil.Process()).pid not in (first, psutil.Process().pid),
            ENDS_S,
            server.log_text,
        )
        server.children()["core"].kill()
        assert server.process.wait(ENDS_S) == 70
        assert "restart budget of 1 exhausted" in server.log_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/nothing/here"], "/nothing/here"),
        (["--model", "builtin://smollm2-135m", "--max-model-len", "9000"], "9000 is more than the model's 8192"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_what_cannot_be_served_ends_the_server_with_the_reason(arguments: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", "0", "--admin-port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0)
    assert done.returncode in (2, 78)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_tokenizer_ends_the_server_with_78(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    last_words = tmp_path / "last-words"
    monkeypatch.setenv("RAYLOOM_TERMINATION_LOG", str(last_words))
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", "0", "--admin-port", "0", str(folder)]
    done = subprocess.run([*command, "--num-kv-blocks", "300"], capture_output=True, text=True, timeout=120.0)
    sentence = f"{folder} has no tokenizer.json; put the model's tokenizer.json there"
    assert (done.returncode, last_words.read_text()) == (78, sentence)
    assert done.stderr.count(sentence) == 1
    assert "Traceback" not in done.stderr
