"""A checkpoint with a NaN: no token is sampled from NaN logits, and an engine that computes only such logits ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rt_gateway import running_gateway, write_key
from rt_ports import free_port
from rt_server import RunningServer, running_server, wait_until
from rt_tiny import tiny_checkpoint, tiny_tokenizer

BAD_TOKEN = 250


def with_nan(folder: Path, tensor: str, row: int) -> str:
    """A value of --model: a tiny checkpoint with one NaN."""
    tiny_tokenizer(folder)
    tiny_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(tensors[tensor].shape[0], -1)[row, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_request_with_a_damaged_token_fails_and_others_do_not(tmp_path: Path) -> None:
    model = with_nan(tmp_path / "model", "model.embed_tokens.weight", BAD_TOKEN)
    front_port = free_port()
    arguments = ("--model", model, "--dtype", "float32", "--served-model-name", "m")
    arguments += ("--front-port", str(front_port), "--front-key-file", str(write_key(tmp_path)))
    with running_server(tmp_path, *arguments) as server:
        url = f"{server.api_url}/v1/completions"
        body = {"model": "m", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        before = server.client.post(url, json={**body, "prompt": [5, 6, 7]}).json()["choices"]
        refused = server.client.post(url, json={**body, "prompt": [5, BAD_TOKEN, 7]})
        after = server.client.post(url, json={**body, "prompt": [5, 6, 7]}).json()["choices"]

        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "corrupt_logits")
        assert "not finite" in refused.json()["error"]["message"]
        assert before == after
        assert server.status()["recoveries"] == [], "the probe is finite, so no rank ended"
        counted = 'rayloom:corrupt_requests_total{model_name="m"} 1'
        metrics = f"{server.api_url}/metrics"  # the core reports once a second
        wait_until(lambda: counted in server.client.get(metrics).text, 60.0, server.log_text)
        assert _finished_and_failed(server) == (3, 1)

        with running_gateway(tmp_path, {"only": front_port}) as gateway:
            url = f"{gateway.api_url}/v1/completions"
            assert server.client.post(url, json={**body, "prompt": [5, 6, 7]}).json()["choices"] == before
            assert server.client.post(url, json={**body, "prompt": [5, BAD_TOKEN, 7]}).status_code == 500
            wait_until(lambda: _finished_and_failed(server) == (5, 2), 60.0, server.log_text)


def _finished_and_failed(server: RunningServer) -> tuple[int, int]:
    requests = server.status()["requests"]
    return requests["finished"], requests["failed"]


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_an_engine_whose_every_token_is_damaged_fails_with_the_cause(tmp_path: Path, executor: str) -> None:
    model = with_nan(tmp_path / "model", "model.layers.1.post_attention_layernorm.weight", 0)
    arguments = ["--model", model, "--dtype", "float32", "--restart-budget", "1", "--port", "0", "--admin-port", "0"]
    if executor == "mp":
        arguments += ["--executor", "mp", "--pipeline-parallel-size", "2"]
    last_words = tmp_path / "termination-log"
    done = subprocess.run(
        [sys.executable, "-m", "rayloom_engine", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "RAYLOOM_TERMINATION_LOG": str(last_words)},
    )
    assert done.returncode == 70, done.stderr
    stage = {"uni": 0, "mp": 1}[executor]
    assert f"stage {stage} turned a probe into hidden states that are not finite" in last_words.read_text()
