"""A server of one rank on the C library never imports torch: none of its processes maps torch's libraries.

test_core_death.py checks a server in float32, test_supervisor_process.py one in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rt_server import RunningServer, running_server
from rt_torch_users import users_of_torch

API_KEY = "key-for-tests"  # the key that conftest.py writes into the server's key file


def test_a_server_with_int8_weights_never_imports_torch(server: RunningServer) -> None:
    assert server.status()["model"]["quantization"] == "int8"
    assert users_of_torch(server, {"Authorization": f"Bearer {API_KEY}"}) == []


def test_torch_is_imported_on_request(three_layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    with running_server(tmp_path, "--model", three_layers, "--num-kv-blocks", "64") as server:
        assert users_of_torch(server) == ["core"]
