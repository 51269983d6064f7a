"""A rank on a GPU is killed while it streams: the stream continues with the same tokens. Run with `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rt_faults import breakable_server, strike
from rt_id_stream import stream_ids
from rt_tiny import tiny_checkpoint, tiny_tokenizer

PROMPT = [5, 17, 33, 8, 90]
NUM_TOKENS = 3000
STRIKE_AT = 300  # tokens
ARGUMENTS = ("--device", "cuda", "--dtype", "float32", "--executor", "mp", "--async-scheduling", "--hang-seconds", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 12}
    folder = tmp_path_factory.mktemp("model")
    return tiny_tokenizer(tiny_checkpoint(folder, **sizes, max_position_embeddings=4096, initializer_range=0.05))


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_stream_continues_with_the_same_tokens(fault: str, folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(folder), "--served-model-name", "m", *ARGUMENTS)
    with breakable_server(tmp_path, *arguments) as server:
        expected = list(stream_ids(server, PROMPT, NUM_TOKENS))
        assert len(expected) == NUM_TOKENS
        before = server.status()["ranks"][0]["pid"]
        found = []
        for token_id in stream_ids(server, PROMPT, NUM_TOKENS):
            found.append(token_id)
            if len(found) == STRIKE_AT:
                strike(server, "rank 0", fault)
        assert server.status()["ranks"][0]["pid"] != before
        print("\n", fault, server.status()["recoveries"][-1])
    assert found == expected
