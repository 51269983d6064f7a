"""Finds the processes of a server that have loaded torch."""

from __future__ import annotations

import psutil

from rt_server import RunningServer

_REQUEST = {
    "prompt": "1 2 3",
    "max_tokens": 3,
    "temperature": 0.8,
    "seed": 1,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logit_bias": {"5": 1},
    "structured_outputs": {"choice": ["a b", "c d"]},
}


def users_of_torch(server: RunningServer, headers: dict[str, str] | None = None) -> list[str]:
    """Roles of the processes that have mapped a library of torch, after a request with many settings."""
    models = server.client.get(f"{server.api_url}/v1/models", headers=headers).json()
    body = {**_REQUEST, "model": models["data"][0]["id"]}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    processes = {"supervisor": psutil.Process(server.process.pid), **server.children()}
    assert {"core", "front"} <= processes.keys()
    return [
        role
        for role, process in processes.items()
        if any("libtorch" in mapping.path for mapping in process.memory_maps())
    ]
