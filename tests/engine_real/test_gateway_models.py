"""One gateway in front of two models with real engines: names, an alias, keys, a changed list, and a killed engine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rt_faults import breakable, slow_steps
from rt_gateway import KEY, Gateway, Program, running_gateway_of_models, start, write_key
from rt_ports import free_port
from rt_server import START_EVERY_S, wait_until
from rt_streams import PROMPTS

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--num-kv-blocks", "128", "--port", "0")
NUM_TOKENS = 64  # steps are slow, so a stream of this length still runs when the engine is suspended
GREEDY = {"temperature": 0.0, "ignore_eos": True}
ALIAS = {"targets": [{"model": "first", "weight": 90}, {"model": "second", "weight": 10}], "sticky_by": "user"}


@dataclass
class Models:
    """The file of models, and their engines."""

    path: Path
    checkpoint: str  # of both models
    ports: dict[str, int]
    engines: dict[str, Program]

    def start_engine(self, name: str) -> None:
        flags = ["--served-model-name", f"own-name-of-{name}", "--admin-port", "0"]
        flags += ["--front-port", str(self.ports[name]), "--front-key-file", str(write_key(self.path.parent))]
        self.engines[name] = start(self.path.parent, name, "serve", "--model", self.checkpoint, *ARGUMENTS, *flags)

    def core(self, name: str) -> psutil.Process:
        """The process of an engine that computes tokens."""
        children = psutil.Process(self.engines[name].process.pid).children()
        (core,) = (each for each in children if "rayloom_engine.core_server.process" in each.cmdline())
        return core

    def keys(self, name: str) -> str:
        path = self.path.parent / f"{name}.keys"
        path.write_text(f"key-of-{name}\n")
        return str(path)

    def write(self, *names: str, aliases: dict[str, Any] | None = None) -> None:
        """Writes the list of models, each with an API key. Like Kubernetes, it replaces the whole file."""
        models = {
            name: {
                "engines": {"e": f"127.0.0.1:{self.ports[name.partition('-')[0]]}"},
                "key": KEY,
                "api_key_file": self.keys(name),
            }
            for name in names
        }
        part = self.path.with_suffix(".part")
        document = {"version": "v1", "models": models, "aliases": aliases or {}, "adapters": {}}
        part.write_text(json.dumps(document))
        os.replace(part, self.path)


@pytest.fixture(scope="module")
def models(three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    made = Models(folder / "models.json", three_layers, {name: free_port() for name in ("first", "second")}, {})
    with breakable(folder):
        try:
            for name in made.ports:
                made.start_engine(name)
            yield made
        finally:
            for engine in made.engines.values():
                engine.kill()


@pytest.fixture(scope="module")
def gateway(models: Models) -> Iterator[Gateway]:
    alias = {**ALIAS, "api_key_file": models.keys("assistant")}
    models.write("first", "second", aliases={"assistant": alias})
    with running_gateway_of_models(models.path.parent, models.path) as running:
        wait_serving(running, "first", "second")
        yield running


def wait_serving(gateway: Gateway, *names: str) -> None:
    def serve() -> bool:
        # The state of the model, not of its engine: the engine may serve before the gateway has the model's tokenizer.
        documents = httpx.get(f"{gateway.admin_url}/status", timeout=20.0).json()["models"]
        return all(documents.get(name, {}).get("state") == "serving" for name in names)

    wait_until(serve, 240.0, gateway.log_text, START_EVERY_S)


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


def complete(gateway: Gateway, model: str, key: str | None = None, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 8, **GREEDY, **fields}
    return httpx.post(f"{gateway.api_url}/v1/completions", json=body, headers=headers(key or model), timeout=180.0)


def stream_text(response: httpx.Response, lines: Iterator[str]) -> str:
    """The rest of a stream's text. The stream must end with [DONE] and without an error."""
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    documents = [json.loads(event) for event in events[:-1]]
    assert not [document for document in documents if "error" in document]
    return "".join(document["choices"][0]["text"] for document in documents)


def test_names_aliases_and_keys_lead_to_the_engines_of_their_model(gateway: Gateway) -> None:
    answers = {name: complete(gateway, name) for name in ("first", "second")}
    assert {name: answer.json()["model"] for name, answer in answers.items()} == {"first": "first", "second": "second"}
    assert complete(gateway, "first", "second").status_code == 401
    assert complete(gateway, "own-name-of-first", "first").json()["error"]["code"] == "model_not_found"
    targets = {}
    for user in ("user 13", "user 14", "user 15"):  # the users 14 and 15 are among the 10 % that get the second model
        seen = {complete(gateway, "assistant", user=user).headers["x-rayloom-model"] for _ in range(2)}
        assert len(seen) == 1, "a user stays"
        targets[user] = seen.pop()
    listed = httpx.get(f"{gateway.api_url}/v1/models", headers=headers("assistant")).json()["data"]
    assert [(each["id"], each["targets"]) for each in listed] == [("assistant", ALIAS["targets"])]
    counted = httpx.get(f"{gateway.admin_url}/status").json()["models"]
    sent = [targets[user] for user in targets for _ in range(2)]
    assert {name: each["requests"]["finished"] for name, each in counted.items()} == {
        name: 1 + sent.count(name) for name in ("first", "second")
    }


def test_a_stream_outlives_its_entry_in_the_list_and_its_engine(gateway: Gateway, models: Models) -> None:
    whole = complete(gateway, "first", max_tokens=NUM_TOKENS).json()["choices"][0]["text"]
    body = {"model": "first", "prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "stream": True, **GREEDY}
    url = f"{gateway.api_url}/v1/completions"
    core = models.core("first")
    with contextlib.ExitStack() as stack:
        with slow_steps(models.path.parent):
            opened = httpx.stream("POST", url, json=body, headers=headers("first"), timeout=240.0)
            response = stack.enter_context(opened)
            lines = response.iter_lines()
            begun = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
            core.suspend()  # the stream must still run when its model is removed from the list and its engine ends
        models.write("second", "second-more")
        wait_serving(gateway, "second-more")
        assert complete(gateway, "second-more").status_code == 200
        assert complete(gateway, "first").status_code == 401, "the removed model's keys are no longer known"
        models.engines["first"].kill()
        models.start_engine("first")
        assert begun + stream_text(response, lines) == whole
    engines = f"{gateway.admin_url}/engines"
    wait_until(lambda: httpx.get(engines).json()["leaving"] == [], 60.0, gateway.log_text)
    assert "Traceback" not in gateway.log_text()

    document = json.loads(models.path.read_text())
    document["models"]["second"]["key"] = "short"
    models.path.write_text(json.dumps(document))
    wait_until(lambda: "models.second.key: must be a string" in gateway.log_text(), 30.0, gateway.log_text)
    wait_until(lambda: complete(gateway, "second").status_code == 401, 30.0, gateway.log_text)
    models.path.write_text("{")
    wait_until(lambda: "the models stay unchanged: " in gateway.log_text(), 30.0, gateway.log_text)
    assert complete(gateway, "second-more").status_code == 200, "a broken entry or file closes no other model"
