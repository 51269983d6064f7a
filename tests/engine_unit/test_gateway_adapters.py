"""LoRA adapters behind a gateway: known adapters, the choice of an engine, continuations, and the prefix cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.core.block_hash import prompt_hashes
from rayloom_engine.errors import EngineDead
from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.front.gateway.adapter_names import GatewayAdapters, merged
from rayloom_engine.front.gateway.models.models_document import ModelsDocument
from rayloom_engine.front.operations.status_document import NO_CORE
from rayloom_engine.protocol.messages import CoreStatus
from rt_engine_pool import IDS, World, ids_of, run, until
from rt_fake_core import BLOCK_SIZE
from rt_gateway_adapters import POEMS, SQL, served, tell, told, with_adapter
from rt_models import World as ModelsWorld
from rt_models import refusal, running, said


async def begun_on_a(world: World) -> ClientSequence:
    """Returns a sequence with the adapter SQL to which the engine "a" has given three tokens, and no more."""
    world.hold(3)
    one = with_adapter(SQL)
    world.client.submit([one])
    assert world.place_of(one) == "a"
    await until(lambda: len(one.generated_ids) == 3)
    return one


def test_a_request_goes_only_to_an_engine_that_has_its_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(POEMS,), b=(SQL, POEMS))
        for number in range(6):
            one = with_adapter(SQL, f"s{number}")
            world.client.submit([one])
            assert world.place_of(one) == "b"
            assert await ids_of(one) == IDS
        assert world.cores["a"].submits == []

    run(tmp_path, story)


def test_a_request_continues_on_an_engine_with_the_same_files_in_another_folder(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        moved = served("other-name", "sql", folder="/elsewhere")
        await told(world, a=(SQL,), b=(moved,))
        world.hold(3)
        one = with_adapter(SQL)
        world.client.submit([one])
        first = world.place_of(one)
        await until(lambda: len(one.generated_ids) == 3)
        other = "b" if first == "a" else "a"
        world.cores[first].is_draining = True
        world.cores[first].send_status()
        await until(lambda: one.place.engine == other)
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS
        own = {"a": SQL, "b": moved}[other].adapter
        assert world.cores[other].submits[-1].params.adapter == own
        assert world.cores[other].submits[-1].generated_ids == tuple(IDS[:3])

    run(tmp_path, story)


@pytest.mark.parametrize("is_left_out", [False, True], ids=["lost", "left out of the list"])
def test_other_files_under_the_same_name_never_continue_a_request(is_left_out: bool, tmp_path: Path) -> None:
    """Both engines have the same fingerprint, the same name and the same folder, but the files differ."""

    async def story(world: World) -> None:
        changed = served("sql", "other files")
        await told(world, a=(SQL,), b=(changed,))
        assert world.client.pool.links["a"].fingerprint == world.client.pool.links["b"].fingerprint
        one = await begun_on_a(world)
        world.cores["a"].die()
        await until(lambda: one.place.engine is None)
        world.cores["b"].release()
        if is_left_out:
            # The sequence may continue here if the files still exist: the rank compares them with this digest.
            world.client.set_engines({"b": world.address("b")})
            await until(lambda: world.cores["b"].submits != [])
            (submit,) = world.cores["b"].submits
            assert submit.params.adapter == SQL.adapter
        else:
            assert world.cores["b"].submits == []
            await told(world, b=(changed, SQL))
            assert await ids_of(one) == IDS
            assert world.cores["b"].submits[-1].params.adapter == SQL.adapter
            assert not one.place.is_rounded

    run(tmp_path, story)


def test_an_engines_own_front_keeps_the_folder_that_it_has_itself_chosen(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        old, new = (served("sql", folder=folder) for folder in ("/old", "/new"))
        await told(world, a=(old,), b=(old,))
        world.client.pool.rules = PoolRules()
        one = with_adapter(new)
        world.client.submit([one])
        assert await ids_of(one) == IDS
        submits = [each for core in world.cores.values() for each in core.submits]
        assert [each.params.adapter.path for each in submits if each.params.adapter] == ["/new/sql"]

    run(tmp_path, story)


def test_a_request_stays_on_a_leaving_engine_while_no_other_has_its_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(SQL,), b=())
        world.hold(3)
        one = with_adapter(SQL)
        world.client.submit([one])
        await until(lambda: len(one.generated_ids) == 3)
        world.client.set_engines({"b": world.address("b")})
        assert world.place_of(one) == "a"
        world.cores["a"].release()
        assert await ids_of(one) == IDS
        assert world.cores["b"].submits == []

    run(tmp_path, story)


def test_a_request_waits_while_the_only_engine_with_its_adapter_is_away(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(SQL,), b=())
        world.cores["a"].state = "recovering"
        world.cores["a"].send_status()
        await until(lambda: not world.client.pool.links["a"].is_serving)
        one = with_adapter(SQL)
        world.client.submit([one])
        assert one.place.engine is None
        world.cores["a"].state = "serving"
        world.cores["a"].send_status()
        assert await ids_of(one) == IDS
        assert world.cores["b"].submits == []

    run(tmp_path, story)


def test_a_request_whose_adapter_is_unloaded_meanwhile_finishes_and_one_that_waits_is_told(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(SQL,), b=(POEMS,))
        world.hold(3)
        one, late = with_adapter(SQL), with_adapter(SQL, "late")
        world.client.submit([one])
        await until(lambda: len(one.generated_ids) == 3)
        await told(world, a=(), b=(POEMS,))
        world.client.submit([late])
        world.cores["a"].is_draining = True
        world.cores["a"].send_status()
        await until(lambda: one.place.engine == "b")
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS, "the files may still be there"
        with pytest.raises(
            EngineDead, match='"/adapters/sql" was unloaded from every engine after the request came; load it again'
        ):
            await ids_of(late)

    run(tmp_path, story)


def test_a_begun_request_whose_adapter_no_engine_has_waits_for_an_engine_with_room_for_adapters(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["b"].takes_adapters = False
        await told(world, a=(SQL,), b=())
        await until(lambda: not world.client.pool.links["b"].takes_adapters)
        one = await begun_on_a(world)
        # The engine "a" is lost for good, and no engine in the list has the adapter.
        world.cores["a"].die()
        world.client.set_engines({"b": world.address("b")})
        await until(lambda: one.place.engine is None)
        for core in world.cores.values():
            core.release()
        # `b` would refuse the sequence as invalid. It waits until an engine with room for adapters is in the list.
        world.client.set_engines({"b": world.address("b"), "a": world.address("a")})
        assert await ids_of(one) == IDS
        assert world.cores["b"].submits == []

    run(tmp_path, story)


def test_an_engine_of_the_version_before_may_have_room_for_adapters() -> None:
    now = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(NO_CORE, takes_adapters=False)))
    former = {name: value for name, value in now.items() if name != "takes_adapters"}
    read = [msgspec.json.decode(msgspec.json.encode(each), type=CoreStatus) for each in (now, former)]
    assert [status.takes_adapters for status in read] == [False, True]


def test_a_cached_prefix_counts_only_for_its_adapter(tmp_path: Path) -> None:
    prompt = tuple(range(8 * BLOCK_SIZE))

    async def story(world: World) -> None:
        await told(world, a=(SQL, POEMS), b=(SQL, POEMS))
        for name, entry in (("a", SQL), ("b", POEMS)):
            world.cores[name].cache(prompt_hashes(prompt, BLOCK_SIZE, b"", entry.adapter.digest))
        await until(lambda: all(len(link.estimate.index) == 8 for link in world.client.pool.links.values()))
        for name, entry in (("a", SQL), ("b", POEMS), ("a", SQL), ("b", POEMS)):
            one = with_adapter(entry, f"{name}-{entry.name}", prompt)
            world.client.submit([one])
            assert world.place_of(one) == name
            await ids_of(one)

    run(tmp_path, story)


entries = st.lists(
    st.lists(
        st.builds(served, st.sampled_from("xyz"), st.sampled_from(("v1", "v2")), st.just("/a"), st.integers(1, 3)),
        max_size=3,
        unique_by=lambda each: each.name,
    ).map(tuple),
    max_size=4,
)


@given(entries)
def test_most_engines_decide_about_the_files_of_a_name(told_by: list[tuple[ServedAdapter, ...]]) -> None:
    found = merged(told_by)
    every = [each for engine in told_by for each in engine]
    assert set(found) == {each.name for each in every}
    for name, chosen in found.items():
        same_name = [each for each in every if each.name == name]
        votes = [each.adapter.digest for each in same_name]
        assert votes.count(chosen.adapter.digest) == max(map(votes.count, votes))


def test_a_gateway_lists_and_serves_the_adapters_of_its_engines(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda world: world.document(one={}, two={})) as world:
            await world.ready("one", "two")
            tell(world.cores["one"], SQL, served("both"))
            tell(world.cores["two"], POEMS, served("both"))
            models = world.models.models
            for name in ("one", "two"):
                await until(lambda name=name: len(models[name].service.adapters.entries) == 2)  # type: ignore[misc]
            cards = (await world.http.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [
                *(("one", None), ("two", None)),
                *(("sql", "one"), ("both", "one"), ("poems", "two"), ("both", "two")),
            ]
            answer = await world.chat("poems")
            assert answer.json()["model"] == "poems"
            assert said(answer) == said(await world.chat("two"))
            assert world.cores["two"].submits[-2].params.adapter == POEMS.adapter
            fingerprints = {(await world.chat(name)).json()["system_fingerprint"] for name in ("two", "poems", "poems")}
            assert len(fingerprints) == 2
            assert (await world.http.get("/v1/models/sql")).json()["root"] == "/adapters/sql"
            assert refusal(await world.chat("both"))[2].startswith(
                '"both" is the name of a LoRA adapter of each of the models "one", "two"; rename the adapter'
            )
            assert refusal(await world.chat("none"))[:2] == (404, "model_not_found")
            load = {"model": "one", "lora_name": "x", "lora_path": "/x"}
            code, kind, message = refusal(await world.http.post("/v1/load_lora_adapter", json=load))
            assert (code, kind) == (403, "adapters_fixed")
            assert "change spec.model.adapters of the LLMService" in message
            of_both = world.document(one={}, two={}).model_copy(update={"adapters": {"one": ("poems",), "two": ()}})
            world.models.apply(of_both)  # one declares the adapter, but only two has it, so two gets the request
            assert said(await world.chat("poems")) == "I am two."

    asyncio.run(story())


def link_with(*adapters: ServedAdapter) -> Any:
    return SimpleNamespace(is_connected=True, status=SimpleNamespace(adapters=adapters))


def test_an_adapter_that_is_withdrawn_while_no_engine_runs_is_unknown_until_an_engine_has_it() -> None:
    adapters = GatewayAdapters()
    adapters.declare(["sql", "poems"])
    assert adapters.update([link_with(SQL, POEMS)])
    adapters.update([])
    adapters.declare(["poems"])
    assert (adapters.state("sql"), adapters.state("poems")) == ("unknown", "reported")
    assert adapters.entries == [POEMS]
    adapters.check_known("sql")  # does not raise, so the answer is 404
    adapters.update([link_with(SQL)])
    assert adapters.state("sql") == "reported"
    adapters.update([])
    adapters.declare(["sql"])
    assert adapters.state("sql") == "reported"


def test_each_service_of_a_model_is_told_the_first_report_of_its_own_engines() -> None:
    before, after = GatewayAdapters(), GatewayAdapters()
    before.declare(["sql", "poems"])
    before.update([link_with(POEMS)])
    before.update([])
    after.continue_from(before)
    assert (after.state("poems"), after.is_awaited("sql")) == ("reported", True)
    assert after.update([link_with(SQL)]) and not after.update([link_with(SQL)])
    assert before.is_awaited("sql"), "its requests still wait"
    assert before.update([link_with(SQL)])


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_declared_adapter_waits_for_the_next_engine_and_no_other_name_does(
    has_tokenizer: bool, tmp_path: Path
) -> None:
    def declared(document: ModelsDocument) -> ModelsDocument:
        return document.model_copy(update={"adapters": {"two": ("poems", "sql")}})

    def without_engines(world: ModelsWorld) -> ModelsDocument:
        return declared(world.document(one={}, two={"engines": {"e": "127.0.0.1:1"}}))

    async def story() -> None:
        if has_tokenizer:  # an earlier process of the gateway leaves the tokenizer in the cache
            async with running(tmp_path, "one two", lambda world: world.document(one={}, two={})) as world:
                await world.ready("one", "two")
        async with running(tmp_path, "one two", without_engines) as world:
            await world.ready("one")
            two = world.models.models["two"]
            await until(lambda: two.service.lifecycle.was_ready is has_tokenizer)
            assert refusal(await world.chat("none"))[:2] == (404, "model_not_found")
            cards = (await world.http.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards[2:]] == [("poems", "two"), ("sql", "two")]
            leaving = asyncio.create_task(world.chat("sql"))
            await until(lambda: len(two.held) == 1)
            leaving.cancel()
            await until(lambda: len(two.held) == 0)
            waiting = asyncio.create_task(world.chat("sql"))
            await until(lambda: len(two.held) == 1)
            status = (await world.admin.get("/status", params={"model": "two"})).json()
            assert status["requests"]["waiting"] == 1, "the operator starts an engine for it"
            world.cores["two"].adapters = (SQL,)
            world.models.apply(declared(world.document(one={}, two={})))
            answer = await waiting
            assert said(answer) == "I am two."
            assert world.cores["two"].submits[-1].params.adapter == SQL.adapter
            for missing in (await world.chat("poems"), await world.http.get("/v1/models/poems")):
                code, kind, message = refusal(missing)
                assert (code, kind) == (503, "engine_unavailable")
                assert message.startswith('model: "poems" is the name of a LoRA adapter that no engine has loaded')

    asyncio.run(story())


def test_without_declared_adapters_a_name_is_unknown_once_each_model_of_the_key_has_reported_its_own(
    tmp_path: Path,
) -> None:
    def document(world: ModelsWorld) -> ModelsDocument:
        world.cores["two"].adapters = None  # the core serves before its front has loaded adapters
        keys = {name: world.keys(name, f"key-{name}") for name in ("one", "two")}
        return world.document(one={"api_key_file": keys["one"]}, two={"api_key_file": keys["two"]})

    async def story() -> None:
        async with running(tmp_path, "one two", document) as world:
            await world.ready("one", "two")
            assert refusal(await world.chat("sql", "key-one"))[:2] == (404, "model_not_found")
            code, kind, message = refusal(await world.chat("sql", "key-two"))
            assert (code, kind) == (503, "engine_unavailable")
            assert message.startswith(
                'model: "sql" is no served model, and may be a LoRA adapter of engines that have not reported'
            )
            tell(world.cores["two"], POEMS)
            await until(lambda: len(world.models.models["two"].service.adapters.entries) == 1)
            assert refusal(await world.chat("sql", "key-two"))[:2] == (404, "model_not_found")

    asyncio.run(story())
