"""A rank on a GPU is killed while it streams: the stream continues with the same tokens. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rt_faults import breakable_server, strike
from rt_server import RunningServer
from rt_tiny import tiny_checkpoint, tiny_tokenizer

NUM_TOKENS = 3000
STRIKE_AT = 300  # tokens
ARGUMENTS = ("--device", "cuda", "--dtype", "float32", "--executor", "mp", "--async-scheduling", "--hang-seconds", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 12}
    folder = tmp_path_factory.mktemp("model")
    return tiny_tokenizer(tiny_checkpoint(folder, **sizes, max_position_embeddings=4096, initializer_range=0.05))


def _tokens(server: RunningServer) -> Iterator[int]:
    """Yields the ids of a greedy stream as they arrive."""
    body: dict[str, Any] = {"model": "m", "prompt": [5, 17, 33, 8, 90], "max_tokens": NUM_TOKENS, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    with server.client.stream("POST", f"{server.api_url}/v1/completions", json=body, timeout=120.0) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (event["choices"][0].get("token_ids") or ()) if event["choices"] else ()


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_stream_continues_with_the_same_tokens(fault: str, folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(folder), "--served-model-name", "m", *ARGUMENTS)
    with breakable_server(tmp_path, *arguments) as server:
        expected = list(_tokens(server))
        assert len(expected) == NUM_TOKENS
        before = server.status()["ranks"][0]["pid"]
        found = []
        for token_id in _tokens(server):
            found.append(token_id)
            if len(found) == STRIKE_AT:
                strike(server, "rank 0", fault)
        assert server.status()["ranks"][0]["pid"] != before
        print("\n", fault, server.status()["recoveries"][-1])
    assert found == expected
