"""A real server with LoRA adapters: many adapters in one batch, changes while requests run, and losses of processes.

A request's tokens are compared with PEFT's in float32, and with its tokens when the request is alone in a batch.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rt_adapters import write_adapter
from rt_faults import aim, breakable_server, slow_steps
from rt_gateway import running_gateway, write_key
from rt_ports import free_port
from rt_server import RunningServer, Stream, is_ready, wait_until
from rt_streams import join_streams, start_streams
from rt_tiny import VOCAB_SIZE, tiny_checkpoint, tiny_tokenizer

NUM_ADAPTERS = 32
WITH_PEFT = slice(0, NUM_ADAPTERS, 5)  # adapters whose tokens PEFT computes, too; some have LoRA rank 8, some 16
NUM_PROMPTS = 16
PROMPT_TOKENS = 12
NUM_TOKENS = 8
STREAM_TOKENS = 64  # steps are slow until a process is killed, so it is killed before streams of this length end
ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024", "--num-kv-blocks", "1024")
PROMPTS = [random.Random(index).choices(range(4, VOCAB_SIZE), k=PROMPT_TOKENS) for index in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, "LlamaForCausalLM", num_hidden_layers=4, max_position_embeddings=1024)
    return tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [write_adapter(parent / f"a{i}", model, seed=i, rank=8 * (1 + i % 2)) for i in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def front_port() -> int:
    """The server's port for gateways."""
    return free_port()


@pytest.fixture(scope="module")
def server(
    model: Path, adapters: list[Path], front_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    given = [f"{folder.name}={folder}" for folder in adapters]
    folder = tmp_path_factory.mktemp("server")
    with breakable_server(
        folder,
        *("--front-port", str(front_port), "--front-host", "127.0.0.1", "--front-key-file", str(write_key(folder))),
        *("--model", str(model), *ARGUMENTS, "--max-num-seqs", "512", "--max-loras", str(NUM_ADAPTERS)),
        *("--allow-runtime-lora-updating", "--lora", *given),
    ) as running:
        yield running


def body(name: str | None, prompts: Any, max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def complete(
    server: RunningServer, name: str | None, prompts: Any = PROMPTS, max_tokens: int = NUM_TOKENS
) -> list[Any]:
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body(name, prompts, max_tokens))
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def kill_beside_streams(server: RunningServer, names: tuple[str | None, ...], victim: str) -> list[Stream]:
    """Kills a process while a stream of each adapter runs. Returns the ended streams."""
    kill = aim(server, victim, "killed")
    with slow_steps(server.log.parent):
        streams, threads = start_streams(server, [body(name, PROMPTS[0], STREAM_TOKENS) for name in names])
        wait_until(lambda: all(len(stream.tokens) >= 16 for stream in streams), 60.0, server.log_text)
        kill()
    join_streams(threads)
    return streams


def refusal(server: RunningServer, path: str, document: dict[str, Any]) -> tuple[int, str]:
    answer = server.client.post(f"{server.api_url}{path}", json=document)
    return answer.status_code, answer.json()["error"]["message"]


def managed_states(server: RunningServer) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.status()["adapters"]}


def peft_tokens(model: Path, adapters: list[Path]) -> list[list[list[int]]]:
    """The greedy tokens of each adapter for each prompt."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(base, str(adapters[0]), adapter_name="0")
    for number, folder in enumerate(adapters[1:], 1):
        adapted.load_adapter(str(folder), adapter_name=str(number))
    found = []
    with torch.no_grad():
        for number in range(len(adapters)):
            adapted.set_adapter(str(number))
            ids = torch.tensor(PROMPTS)
            for _ in range(NUM_TOKENS):
                ids = torch.cat([ids, adapted(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            found.append(ids[:, PROMPT_TOKENS:].tolist())
    return found


def test_requests_of_many_adapters_in_one_batch_get_the_tokens_of_peft_and_of_each_alone(
    server: RunningServer, model: Path, adapters: list[Path]
) -> None:
    names = [folder.name for folder in adapters]
    with ThreadPoolExecutor(NUM_ADAPTERS + 1) as pool:
        mixed = list(pool.map(lambda name: complete(server, name), [*names, None]))
    assert mixed[:-1][WITH_PEFT] == peft_tokens(model, adapters[WITH_PEFT])
    assert len({json.dumps(tokens) for tokens in mixed}) == NUM_ADAPTERS + 1
    for number, name in enumerate([*names, None]):
        prompt = number % NUM_PROMPTS
        assert complete(server, name, PROMPTS[prompt]) == [mixed[number][prompt]]


def test_the_list_of_models_names_the_adapters_with_their_base(server: RunningServer, adapters: list[Path]) -> None:
    cards = server.client.get(f"{server.api_url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["m", *(folder.name for folder in adapters)]
    assert (cards[1]["root"], cards[1]["parent"], cards[0]["parent"]) == (str(adapters[0]), "m", None)
    assert server.client.get(f"{server.api_url}/v1/models/a3").json() == cards[4]
    answer = server.client.get(f"{server.api_url}/v1/models/none")
    assert answer.status_code == 404


def test_every_endpoint_takes_an_adapter_as_its_model(server: RunningServer) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": hello, "max_tokens": 4, "temperature": 0}),
        ("/v1/messages", {"messages": hello, "max_tokens": 4, "temperature": 0}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "temperature": 0}),
    ):
        texts = []
        for name in ("a0", "a1", "m"):
            answer = server.client.post(f"{server.api_url}{path}", json={**fields, "model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            document = answer.json()
            texts.append(json.dumps(document.get("choices") or document.get("content") or document["output"]))
        assert len({text.split("id", 1)[0] + text[-200:] for text in texts}) == 3, path
    answer = server.client.post(f"{server.api_url}/tokenize", json={"model": "a0", "prompt": "Hello"})
    assert answer.json()["count"] == 5
    status, message = refusal(server, "/v1/completions", body("b0", "Hello"))
    assert (status, message.startswith('the model "b0" does not exist; this server has "m", "a0"')) == (404, True)


def test_a_gateway_serves_the_adapters_of_its_engine(
    server: RunningServer, front_port: int, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "new", model, seed=33)
    with running_gateway(tmp_path, {"e": front_port}) as gateway, httpx.Client(base_url=gateway.api_url) as client:

        def listed() -> list[str]:
            return [card["id"] for card in client.get("/v1/models").json()["data"]]

        def ask(name: str) -> httpx.Response:
            return client.post("/v1/completions", json=body(name, PROMPTS[0]), timeout=60.0)

        assert listed() == ["m", *(f"a{number}" for number in range(NUM_ADAPTERS))]
        for name in ("m", "a0", "a1"):
            answer = ask(name).json()
            assert [choice["token_ids"] for choice in answer["choices"]] == complete(server, name, PROMPTS[0])
        load = {"lora_name": "new", "lora_path": str(folder)}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 403
        assert server.client.post(f"{server.api_url}/v1/load_lora_adapter", json=load).status_code == 200
        wait_until(lambda: "new" in listed(), 60.0, gateway.log_text)
        assert ask("new").json()["choices"][0]["token_ids"] == complete(server, "new", PROMPTS[0])[0]
        server.client.post(f"{server.api_url}/v1/unload_lora_adapter", json={"lora_name": "new"})
        wait_until(lambda: "new" not in listed(), 60.0, gateway.log_text)
        assert ask("new").json()["error"]["message"].startswith('the model "new" does not exist; this server has "m"')


def test_adapters_come_and_go_while_requests_run(server: RunningServer, model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "new", model, seed=99)
    [expected] = complete(server, "a0", PROMPTS[0])
    streams, threads = start_streams(server, [body("a0", PROMPTS[0], 400), body(None, PROMPTS[1], 400)])
    for round_number in range(3):
        name = f"new{round_number}"
        load = {"lora_name": name, "lora_path": str(folder)}
        answer = server.client.post(f"{server.api_url}/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        running = threading.Thread(target=complete, args=(server, name, PROMPTS[:4], 40))
        running.start()
        first = complete(server, name, PROMPTS[0])
        answer = server.client.post(f"{server.api_url}/v1/unload_lora_adapter", json={"lora_name": name})
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
        assert refusal(server, "/v1/completions", body(name, PROMPTS[0]))[0] == 404
        running.join()
        assert first != [expected]
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None, None]
    assert server.status()["requests"]["failed"] == 0


def test_wrong_adapters_are_refused_with_a_sentence(server: RunningServer, model: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "LlamaForCausalLM", hidden_size=32, num_hidden_layers=1)
    deeper = tiny_checkpoint(tmp_path / "deeper", "LlamaForCausalLM", num_hidden_layers=5)
    write_adapter(tmp_path / "narrow", other)
    write_adapter(tmp_path / "deep", deeper)
    write_adapter(tmp_path / "wide", model, rank=32)
    write_adapter(tmp_path / "dora", model, use_dora=True)
    path = "/v1/load_lora_adapter"
    for folder, status, words in (
        ("absent", 404, "adapter_config.json does not exist; a LoRA adapter is a folder with"),
        ("narrow", 400, "and this model's matrix [64, 96] needs A [rank, 96] and B [64, rank]"),
        ("deep", 400, "updates what this model does not have, or what no adapter can update: "),
        ("wide", 400, "the adapter has rank 32, and max_lora_rank is 16; raise max_lora_rank"),
        ("dora", 400, "use_dora is true, and DoRA is not supported; train the adapter without it"),
    ):
        given = refusal(server, path, {"lora_name": "x", "lora_path": str(tmp_path / folder)})
        assert given[0] == status, given
        assert words in given[1], given
    assert refusal(server, path, {"lora_name": "a0", "lora_path": str(tmp_path / "wide")}) == (
        400,
        'the adapter "a0" is loaded already; unload it first, or set load_inplace',
    )
    assert refusal(server, "/v1/unload_lora_adapter", {"lora_name": "x"})[0] == 404


def test_files_that_changed_after_the_load_end_their_request_alone(
    server: RunningServer, front_port: int, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "changed", model, seed=7)
    load = {"lora_name": "changed", "lora_path": str(folder)}
    assert server.client.post(f"{server.api_url}/v1/load_lora_adapter", json=load).status_code == 200
    write_adapter(folder, model, seed=8)
    expected = (503, f"{folder}: the files of the adapter have changed since it was loaded; load it again")
    assert refusal(server, "/v1/completions", body("changed", PROMPTS[0])) == expected
    with running_gateway(tmp_path, {"e": front_port}) as gateway:
        asked = httpx.post(f"{gateway.api_url}/v1/completions", json=body("changed", PROMPTS[0]), timeout=60.0)
    assert (asked.status_code, asked.json()["error"]["message"]) == expected
    assert asked.json()["error"]["code"] == "adapter_failed"
    answer = server.client.post(f"{server.api_url}/v1/load_lora_adapter", json={**load, "load_inplace": True})
    assert answer.status_code == 200
    assert len(complete(server, "changed")) == NUM_PROMPTS
    server.client.post(f"{server.api_url}/v1/unload_lora_adapter", json={"lora_name": "changed"})


@pytest.mark.parametrize("victim", ["core", "front"])
def test_a_killed_process_loses_no_adapter(server: RunningServer, model: Path, tmp_path: Path, victim: str) -> None:
    folder = write_adapter(tmp_path / "late", model, seed=11)
    name = f"late-{victim}"
    load = {"lora_name": name, "lora_path": str(folder)}
    assert server.client.post(f"{server.api_url}/v1/load_lora_adapter", json=load).status_code == 200
    names = (name, "a1", None)
    alone = [complete(server, each, PROMPTS[0], STREAM_TOKENS)[0] for each in names]
    streams = kill_beside_streams(server, names, victim)
    if victim == "core":
        assert [stream.failure for stream in streams] == [None] * len(names)
        assert all(len(stream.tokens) == STREAM_TOKENS for stream in streams)
    wait_until(lambda: is_ready(server), 60.0, server.log_text)
    assert [complete(server, each, PROMPTS[0], STREAM_TOKENS)[0] for each in names] == alone
    shutil.rmtree(folder)


def test_ranks_that_share_a_model_share_its_adapters_and_load_them_again(
    server: RunningServer, model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("a0", "a1", None)
    expected = [complete(server, name, PROMPTS[0], STREAM_TOKENS)[0] for name in names]
    changed = write_adapter(tmp_path_factory.mktemp("adapters") / "changed", model, seed=21)
    with breakable_server(
        tmp_path_factory.mktemp("shared"),
        *("--model", str(model), *ARGUMENTS, "--executor", "mp"),
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
        *("--managed-adapters", "--lora", *(f"{folder.name}={folder}" for folder in (*adapters[:2], changed))),
    ) as shared:
        # The front has read the adapter before this change. No rank has read it, so all ranks find changed files.
        write_adapter(changed, model, seed=22)
        assert refusal(shared, "/v1/completions", body(changed.name, PROMPTS[0])) == (
            503,
            f"{changed}: the files of the adapter have changed since it was loaded; load it again",
        )
        assert shared.status()["recoveries"] == []
        assert [complete(shared, name, PROMPTS[0], STREAM_TOKENS)[0] for name in names] == expected
        streams = kill_beside_streams(shared, names, "rank 3")
        assert [(stream.failure, len(stream.tokens)) for stream in streams] == [(None, STREAM_TOKENS)] * 3
        assert [complete(shared, name, PROMPTS[0], STREAM_TOKENS)[0] for name in names] == expected
        wanted = {"a1": str(adapters[1]), "a2": str(adapters[2]), "lost": str(changed / "lost")}
        answer = shared.client.put(f"{shared.admin_url}/adapters", json={"adapters": wanted})
        assert answer.status_code == 202
        expected_states = {"a1": "loaded", "a2": "loaded", "lost": "failed"}
        wait_until(lambda: managed_states(shared) == expected_states, 60.0, shared.log_text)
        assert complete(shared, "a2", PROMPTS[0]) == complete(server, "a2", PROMPTS[0])
        assert refusal(shared, "/v1/completions", body("a0", PROMPTS[0]))[0] == 404
        assert refusal(shared, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}) == (
            403,
            "only the admin port changes the adapters of this server (managed_adapters); change spec.model.adapters of "
            "the LLMService, or send PUT /adapters to the admin port",
        )
