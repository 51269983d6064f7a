"""LoRA adapters of a hub: their tokens, ranks with disks of their own, a lost rank, and each refusal.

The hub is a server of the test (rt_hub), and the downloads are real. An adapter's tokens are compared with those of the
same files in a local folder. test_adapters.py tests local folders.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rt_adapters import write_adapter
from rt_faults import breakable, slow_steps, strike
from rt_hub import COMMIT, serve_hub
from rt_job import running_job
from rt_server import RunningServer, is_ready, running_server, wait_until
from rt_streams import join_streams, start_streams
from rt_tiny import VOCAB_SIZE, tiny_checkpoint, tiny_tokenizer

ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "512", "--num-kv-blocks", "256")
PROMPT = random.Random(5).choices(range(4, VOCAB_SIZE), k=12)
LOAD = "/v1/load_lora_adapter"


class Hub(NamedTuple):
    url: str
    seen: list[str]  # requests
    model: Path
    folders: dict[str, Path]  # repository -> folder

    def environ(self, home: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    parent = tmp_path_factory.mktemp("hub")
    model = parent / "model"
    tiny_checkpoint(model, "LlamaForCausalLM", num_hidden_layers=4, max_position_embeddings=512)
    tiny_tokenizer(model)
    folders = {f"acme/{name}": write_adapter(parent / name, model, seed=seed) for seed, name in enumerate("ab")}
    wide = write_adapter(parent / "wide", model, rank=32)
    padded = write_adapter(parent / "padded", model)
    with (padded / "adapter_model.safetensors").open("ab") as file:
        file.truncate(64 << 20)
    pickled = write_adapter(parent / "pickled", model)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    bare = write_adapter(parent / "bare", model)
    (bare / "adapter_model.safetensors").unlink()
    other = write_adapter(parent / "other", tiny_checkpoint(parent / "other-model", "LlamaForCausalLM", hidden_size=32))
    empty = parent / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("nothing")
    for folder in (wide, padded, pickled, bare, other, empty):
        folders[f"acme/{folder.name}"] = folder
    seen: list[str] = []
    with serve_hub("acme/a", folders["acme/a"], others=folders, seen=seen) as url:
        yield Hub(url, seen, model, folders)


@pytest.fixture(scope="module")
def server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of one rank with the adapter a from the hub, and the adapters a and b from local folders."""
    folder = tmp_path_factory.mktemp("server")
    with running_server(
        folder,
        *("--model", str(hub.model), *ARGUMENTS, "--allow-runtime-lora-updating"),
        *("--lora", "hub-a=hf://acme/a", f"a={hub.folders['acme/a']}", f"b={hub.folders['acme/b']}"),
        environ=hub.environ(folder / "home"),
    ) as running:
        yield running


def body(name: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def complete(server: RunningServer, name: str, max_tokens: int = 100) -> Any:
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body(name, max_tokens))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def load(server: RunningServer, name: str, path: str) -> tuple[int, str]:
    answer = server.client.post(f"{server.api_url}{LOAD}", json={"lora_name": name, "lora_path": path})
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]


def kill_and_wait(server: RunningServer, role: str) -> None:
    """Kills a process of the server, and returns once another process of this role serves."""
    before = server.children()[role]
    strike(server, role, "killed")
    wait_until(lambda: server.children().get(role, before).pid != before.pid, 60.0, server.log_text)
    wait_until(lambda: is_ready(server), 60.0, server.log_text)


def weights(home: Path, repository: str) -> Path:
    folder = home / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
    return folder / "adapter_model.safetensors"


def test_an_adapter_of_the_hub_gives_the_tokens_of_its_folder(server: RunningServer) -> None:
    assert complete(server, "hub-a") == complete(server, "a") != complete(server, "m")
    assert load(server, "hub-b", "acme/b@main")[0] == 200
    assert complete(server, "hub-b") == complete(server, "b") != complete(server, "a")
    roots = {card["id"]: card["root"] for card in server.client.get(f"{server.api_url}/v1/models").json()["data"]}
    assert (roots["hub-a"], roots["hub-b"]) == (f"hf://acme/a@{COMMIT}", f"hf://acme/b@{COMMIT}")


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("hf://acme/none", 404, "does not exist on the hub, or is private; check the name, or set HF_TOKEN"),
        ("acme/none", 404, "hf://acme/none does not exist on the hub"),
        ("hf://acme/a@v9", 404, "hf://acme/a@v9: there is no such branch, tag or commit"),
        ("hf://acme/a@x/../../../a", 400, "a revision has no part '.' or '..'; name a branch, tag or commit"),
        ("hf://acme", 400, "names no repository of the hub; write hf://ORG/NAME or hf://ORG/NAME@REVISION"),
        ("hf://acme/empty", 404, "has no adapter_config.json, so it is no LoRA adapter in PEFT's format"),
        ("hf://acme/pickled", 404, "only in adapter_model.bin, which can run code when it is read; convert it"),
        ("hf://acme/bare", 404, "has no adapter_model.safetensors; name the repository of an adapter"),
        ("hf://acme/wide", 400, "the adapter has rank 32, and max_lora_rank is 16; raise max_lora_rank"),
        ("hf://acme/padded", 400, "adapter_model.safetensors has 67108864 bytes, at most "),
        ("hf://acme/other", 400, "and this model's matrix"),
        ("hf://gated/model", 400, "needs access: accept its terms on the hub, then set HF_TOKEN"),
        ("hf://forbidden/model", 400, "the hub refuses access; set HF_TOKEN to a token that may read it"),
        ("hf://broken/model", 503, "is not in the local hub cache and the hub cannot be reached"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_with_a_sentence(
    server: RunningServer, hub: Hub, path: str, status: int, words: str
) -> None:
    num_seen = len(hub.seen)
    found = load(server, "x", path)
    assert found[0] == status, found
    assert words in found[1], found
    new = hub.seen[num_seen:]
    if path != "hf://acme/other":  # only the weights show that an adapter is for another model
        assert not [request for request in new if request.startswith("GET") and "adapter_model" in request]
    assert "x" not in [card["id"] for card in server.client.get(f"{server.api_url}/v1/models").json()["data"]]


def test_a_load_from_a_silent_hub_delays_neither_an_unload_nor_another_load(server: RunningServer, hub: Hub) -> None:
    silent: list[tuple[int, str]] = []
    waiting = threading.Thread(target=lambda: silent.append(load(server, "silent", "hf://slow/model")))
    num_seen = len(hub.seen)
    waiting.start()
    wait_until(lambda: any("slow/model" in request for request in hub.seen[num_seen:]), 60.0, server.log_text)
    assert load(server, "hub-c", "hf://acme/a")[0] == 200
    answer = server.client.post(f"{server.api_url}/v1/unload_lora_adapter", json={"lora_name": "hub-c"})
    assert answer.status_code == 200
    assert waiting.is_alive(), "the hub has not answered yet"
    waiting.join()
    assert silent[0][0] == 503
    assert "the hub cannot be reached" in silent[0][1]


def test_ranks_with_disks_of_their_own_fetch_an_adapter_before_it_is_loaded(
    server: RunningServer, hub: Hub, tmp_path: Path
) -> None:
    homes = [tmp_path / "home0", tmp_path / "home1"]
    with serve_hub("acme/a", hub.folders["acme/a"], others={"acme/wide": hub.folders["acme/wide"]}) as other_url:
        environs = [hub.environ(homes[0]), {**hub.environ(homes[1]), "HF_ENDPOINT": other_url}]
        with running_job(
            tmp_path,
            *("--model", str(hub.model), *ARGUMENTS, "--device", "cpu", "--allow-runtime-lora-updating"),
            *("--executor", "external", "--pipeline-parallel-size", "2", "--lora", "hub-a=hf://acme/a"),
            environs=environs,
        ) as job:
            assert [weights(home, "acme/a").exists() for home in homes] == [True, True]
            assert complete(job.server, "hub-a") == complete(server, "a")

            # The hub of rank 1 does not have this adapter.
            status, words = load(job.server, "hub-b", "hf://acme/b")
            assert (status, words.split(": ")[0]) == (503, f"hf://acme/b@{COMMIT}")
            assert "rank 1 on " in words
            assert f"hf://acme/b@{COMMIT} does not exist on the hub" in words
            assert complete(job.server, "hub-a") == complete(server, "a")


def test_a_replacement_rank_fetches_the_adapter_before_its_first_step(
    server: RunningServer, hub: Hub, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    expected = complete(server, "a", 400)
    serving = running_server(
        tmp_path,
        *("--model", str(hub.model), *ARGUMENTS, "--executor", "mp", "--pipeline-parallel-size", "2"),
        *("--lora", "hub-a=hf://acme/a"),
        environ=hub.environ(home),
    )
    with breakable(tmp_path), serving as two:
        with slow_steps(tmp_path):  # the stream must not end before the rank
            streams, threads = start_streams(two, [body("hub-a", 400)])
            wait_until(lambda: len(streams[0].tokens) >= 16, 60.0, two.log_text)
            # Without this cache, the replacement is like a rank on another machine.
            shutil.rmtree(home / "hub")
            strike(two, "rank 1", "killed")
        join_streams(threads)
        assert (streams[0].failure, len(streams[0].tokens)) == (None, 400)
        assert weights(home, "acme/a").exists()
        assert complete(two, "hub-a", 400) == expected


def test_managed_adapters_of_the_hub_report_their_commit_and_restarted_processes_keep_them(
    server: RunningServer, hub: Hub, tmp_path: Path
) -> None:
    with running_server(
        tmp_path,
        *("--model", str(hub.model), *ARGUMENTS, "--managed-adapters"),
        environ=hub.environ(tmp_path / "home"),
    ) as managed:

        def states() -> dict[str, tuple[str, str]]:
            return {each["name"]: (each["state"], each["commit"]) for each in managed.status()["adapters"]}

        wanted = {"a": "hf://acme/a", "none": "hf://acme/none"}
        answer = managed.client.put(f"{managed.admin_url}/adapters", json={"adapters": wanted})
        assert answer.status_code == 202
        expected = {"a": ("loaded", COMMIT), "none": ("failed", "")}
        wait_until(lambda: states() == expected, 60.0, managed.log_text)
        num_seen = len(hub.seen)
        pinned = {"a": f"hf://acme/a@{COMMIT}"}
        managed.client.put(f"{managed.admin_url}/adapters", json={"adapters": pinned})
        wait_until(lambda: states() == {"a": ("loaded", COMMIT)}, 60.0, managed.log_text)
        assert hub.seen[num_seen:] == [], "the commit is loaded already"
        for role in ("front", "core"):
            kill_and_wait(managed, role)
            assert complete(managed, "a") == complete(server, "a")
        assert hub.seen[num_seen:] == []


def test_a_server_without_a_network_serves_what_the_cache_has(server: RunningServer, hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    arguments = ("--model", str(hub.model), *ARGUMENTS, "--allow-runtime-lora-updating", "--lora", "hub-a=hf://acme/a")
    with running_server(tmp_path, *arguments, environ=hub.environ(home)):
        pass
    num_seen = len(hub.seen)
    offline = {**hub.environ(home), "HF_HUB_OFFLINE": "1"}
    with running_server(tmp_path, *arguments, environ=offline) as alone:
        assert complete(alone, "hub-a") == complete(server, "a")
        status, words = load(alone, "b", "hf://acme/b")
        assert status == 503
        assert "hf://acme/b is not in the local hub cache and the hub cannot be reached" in words
    assert hub.seen[num_seen:] == []
