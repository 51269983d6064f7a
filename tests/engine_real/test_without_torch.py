"""A server of one rank on the C library never imports torch: no process of it maps torch's libraries."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rt_server import RunningServer, running_server

API_KEY = "key-for-tests"  # what conftest.py writes into the server's key file

REQUEST = {
    "prompt": "1 2 3",
    "max_tokens": 3,
    "temperature": 0.8,
    "seed": 1,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logit_bias": {"5": 1},
    "structured_outputs": {"choice": ["a b", "c d"]},
}


def users_of_torch(server: RunningServer) -> list[str]:
    """Roles of the processes that have mapped a library of torch, after a request with many settings."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    models = server.client.get(f"{server.api_url}/v1/models", headers=headers).json()
    body = {**REQUEST, "model": models["data"][0]["id"]}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    processes = {"supervisor": psutil.Process(server.process.pid), **server.children()}
    assert {"core", "front"} <= processes.keys()
    return [
        role
        for role, process in processes.items()
        if any("libtorch" in mapping.path for mapping in process.memory_maps())
    ]


def test_int8(server: RunningServer) -> None:
    assert server.status()["model"]["quantization"] == "int8"
    assert users_of_torch(server) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_and_bfloat16(dtype: str, three_layers: str, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model", three_layers, "--num-kv-blocks", "64", "--dtype", dtype) as server:
        assert server.status()["model"]["compute_dtype"] == dtype
        assert users_of_torch(server) == []


def test_torch_on_request(three_layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    with running_server(tmp_path, "--model", three_layers, "--num-kv-blocks", "64") as server:
        assert users_of_torch(server) == ["core"]
