"""Real servers that tests share if they do not change them. Tests that kill or configure a server start their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from rt_server import RunningServer, running_server
from rt_shared import SharedServer
from rt_streams import Said, undisturbed
from rt_tiny import tiny_checkpoint, tiny_tokenizer

API_KEY = "key-for-tests"


@pytest.fixture(scope="session")
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(f"{API_KEY}\n")
    # The weights are int8, because in float32 a token would take four times as much CPU time.
    weights = ("--dtype", "bfloat16", "--quantization", "int8")
    arguments = (*weights, "--max-model-len", "1024", "--api-key-file", str(keys), "--max-logprobs", "-1")
    with contextlib.closing(_shared(request, "server", lambda: running_server(folder, *arguments))) as shared:
        yield shared
    if request.session.testsfailed:
        print(f"the server's log:\n{(folder / 'server.log').read_text()}")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, shared_server: SharedServer) -> Iterator[RunningServer]:
    """`rayloom-engine serve` with the embedded model in int8. Its log is printed if a test of the run has failed."""
    with shared_server.used_by(request.path) as running:
        yield running


@pytest.fixture(scope="session")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A value of --model: a tiny model that 2 or 4 ranks can divide by layers or by shards, and 3 ranks by layers."""
    folder = tmp_path_factory.mktemp("three-layers")
    tiny_checkpoint(folder, "Qwen3ForCausalLM", num_hidden_layers=3, head_dim=16, max_position_embeddings=1024)
    return str(tiny_tokenizer(folder, has_tools=True))


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A value of --model: a small model. Steps take milliseconds, so tokens arrive one by one, and streams overlap."""
    folder = tmp_path_factory.mktemp("quick")
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 2}
    tiny_checkpoint(folder, "Qwen3ForCausalLM", num_hidden_layers=12, max_position_embeddings=1024, **sizes)
    return str(tiny_tokenizer(folder, has_tools=True))


@pytest.fixture(scope="session")
def shared_one_rank(
    request: pytest.FixtureRequest, three_layers: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    arguments = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
    folder = tmp_path_factory.mktemp("one-rank")
    with contextlib.closing(
        _shared(request, "one_rank", lambda: running_server(folder, "--model", three_layers, *arguments))
    ) as shared:
        yield shared


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest, shared_one_rank: SharedServer) -> Iterator[RunningServer]:
    """A server of one rank with `three_layers` as "m", in float32. Servers with other settings must give its tokens."""
    with shared_one_rank.used_by(request.path) as running:
        yield running


@pytest.fixture(scope="session")
def known_answers() -> dict[int, list[Said]]:
    return {}


@pytest.fixture(scope="module")
def said_by_one_rank(one_rank: RunningServer, known_answers: dict[int, list[Said]]) -> Callable[[int], list[Said]]:
    """Returns the undisturbed streams of `one_rank` with this number of tokens."""

    def said(num_tokens: int) -> list[Said]:
        if num_tokens not in known_answers:
            known_answers[num_tokens] = undisturbed(one_rank, num_tokens)
        return known_answers[num_tokens]

    return said


def _shared(
    request: pytest.FixtureRequest, name: str, start: Callable[[], contextlib.AbstractContextManager[RunningServer]]
) -> SharedServer:
    return SharedServer(name, start, {item.path for item in request.session.items})
