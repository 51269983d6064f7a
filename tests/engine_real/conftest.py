"""One real server for tests that do not change it. Tests that kill or configure a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rt_server import RunningServer, running_server
from rt_tiny import tiny_checkpoint, tiny_tokenizer

API_KEY = "key-for-tests"


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`rayloom-engine serve` with the embedded model in float32. Its log is printed when a test of the run failed."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(f"{API_KEY}\n")
    arguments = ("--dtype", "float32", "--max-model-len", "1024", "--api-key-file", str(keys), "--max-logprobs", "-1")
    with running_server(folder, *arguments) as running:
        yield running
        if request.session.testsfailed:
            print(f"the server's log:\n{running.log_text()}")


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, as --model takes it, that 2 or 4 ranks can share in every way, and 3 ranks as stages."""
    folder = tmp_path_factory.mktemp("four-layers")
    tiny_checkpoint(folder, "Qwen3ForCausalLM", num_hidden_layers=4, head_dim=16, max_position_embeddings=1024)
    return str(tiny_tokenizer(folder, has_tools=True))


@pytest.fixture(scope="session")
def one_rank(four_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of one rank with this model, named "m", in float32. All other settings must give its tokens."""
    arguments = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
    with running_server(tmp_path_factory.mktemp("one-rank"), "--model", four_layers, *arguments) as running:
        yield running
