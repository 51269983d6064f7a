"""The list spec.model.adapters on a real API server, in engines and in the status.

Engines start with the list. They receive a changed list while they serve, and again after a restart. The status shows
the number of engines that have each adapter.
"""

from __future__ import annotations

from typing import Any

from api.namespaces import llm_service
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import MERGE

_FOLDER = "/models/adapters"  # simulated nodes have no files, so volumes are not mounted
_SQL, _POEMS = ({"name": name, "source": f"file://{_FOLDER}/{name}"} for name in ("sql", "poems"))


def _adapters(world: World, namespace: str) -> list[dict[str, str] | None]:
    return [engine.adapters for engine in world.engines_of(namespace, "chat").values()]


def _status(world: World, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = world.services[(namespace, "chat")].get("status", {})
    return found


def _states(world: World, namespace: str) -> list[tuple[str, str, str]]:
    return [(each["name"], each["state"], each["loaded"]) for each in _status(world, namespace).get("adapters", ())]


def _commits(world: World, namespace: str) -> list[str | None]:
    return [each.get("commit") for each in _status(world, namespace).get("adapters", ())]


def _change(world: World, namespace: str, *adapters: dict[str, str]) -> None:
    path = f"{LLM}/namespaces/{namespace}/llmservices/chat"
    world.request("PATCH", path, {"spec": {"model": {"adapters": list(adapters)}}}, content_type=MERGE)


def test_a_changed_list_reaches_engines_that_serve_and_one_that_was_restarted(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    model = {"source": "builtin://smollm2-135m", "adapters": [_SQL]}
    world.create(llm_service(namespace, "chat", model=model, replicas=2))
    world.wait_serving(namespace, "chat")
    first = {"sql": f"{_FOLDER}/sql"}
    # A service is Available as soon as its first engine serves.
    wait_until(lambda: _adapters(world, namespace) == [first, first], "two engines with the list of their pods")
    wait_until(lambda: _states(world, namespace) == [("sql", "Loaded", "2/2")], "the status", story=world.story)
    before = sorted(world.engines_of(namespace, "chat"))
    revision = _status(world, namespace)["updateRevision"]

    _change(world, namespace, _SQL, _POEMS)
    both = {**first, "poems": f"{_FOLDER}/poems"}
    wait_until(lambda: _adapters(world, namespace) == [both, both], "the engines' lists", story=world.story)
    loaded = [("sql", "Loaded", "2/2"), ("poems", "Loaded", "2/2")]
    wait_until(lambda: _states(world, namespace) == loaded, "the status", story=world.story)
    assert sorted(world.engines_of(namespace, "chat")) == before, "no engine was replaced"
    assert _status(world, namespace)["updateRevision"] == revision

    # A restarted container begins with the list that its pod got at its creation.
    world.engine(namespace, "chat", adapters=dict(first))
    wait_until(lambda: _adapters(world, namespace) == [both, both], "the restarted engine's list", story=world.story)

    world.engine(namespace, "chat", broken_adapters={f"{_FOLDER}/poems": "adapter_config.json does not exist"})
    failed = [("sql", "Loaded", "2/2"), ("poems", "Failed", "1/2")]
    wait_until(lambda: _states(world, namespace) == failed, "the failure", story=world.story)
    message = world.wait(namespace, "chat", "Degraded", "AdapterFailed", "1/2")["message"]
    assert message.startswith("Adapter poems is loaded on 1/2 engines. ")
    assert ": adapter_config.json does not exist. Put the adapter's files where spec.model.adapters says" in message

    _change(world, namespace)
    wait_until(lambda: _adapters(world, namespace) == [{}, {}], "the empty lists", story=world.story)
    wait_until(lambda: _states(world, namespace) == [], "the status", story=world.story)
    world.wait(namespace, "chat", "Degraded", "Healthy")
    assert sorted(world.engines_of(namespace, "chat")) == before


def test_all_engines_load_an_adapter_of_the_hub_from_one_commit(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    commit, later = "a" * 40, "b" * 40
    model = {"source": "builtin://smollm2-135m", "adapters": [{"name": "sql", "source": "hf://acme/sql"}]}
    world.create(llm_service(namespace, "chat", model=model, replicas=1))
    world.wait_serving(namespace, "chat")
    assert _adapters(world, namespace) == [{"sql": "hf://acme/sql"}]
    world.engine(namespace, "chat", hub_commit=commit)
    wait_until(lambda: _commits(world, namespace) == [commit], "the commit in the status", story=world.story)

    # The branch moves. The pod of the second engine is created with the first engine's commit.
    world.engine(namespace, "chat", hub_commit=later)
    world.request(
        "PATCH", f"{LLM}/namespaces/{namespace}/llmservices/chat", {"spec": {"replicas": 2}}, content_type=MERGE
    )
    pinned = {"sql": f"hf://acme/sql@{commit}"}
    wait_until(lambda: _adapters(world, namespace) == [pinned, pinned], "the engines' lists", story=world.story)
    wait_until(lambda: _states(world, namespace) == [("sql", "Loaded", "2/2")], "the status", story=world.story)
    assert _commits(world, namespace) == [commit]
