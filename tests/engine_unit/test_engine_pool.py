"""A gateway's sequences on several engines: the choice of the engine, and lost, full or draining engines.

The engines are fake cores, whose tokens are the bytes of a text: token k of a sequence is always the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rayloom_engine.core.embeds import EmbeddedPrompt, Embeds
from rayloom_engine.errors import EngineDead, PoisonousRequest, QueueFull
from rayloom_engine.front.core_link import core_client, engine_choice
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.messages import SequenceOutput
from rt_engine_pool import IDS, World, ids_of, run, sequence, until
from rt_fake_core import FINGERPRINT


async def held_after_four_ids(world: World) -> ClientSequence:
    """Submits a sequence, and returns when its engine has generated four ids. Further ids come only after `release`."""
    world.hold(4)
    one = sequence()
    world.client.submit([one])
    await until(lambda: len(one.generated_ids) == 4)
    return one


def test_a_sequence_of_a_lost_engine_continues_on_another_one(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        first = world.place_of(one)
        world.cores[first].die()
        await until(lambda: one.place.engine not in (None, first))
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS
        (submit,) = world.cores["b" if first == "a" else "a"].submits
        assert (submit.generated_ids, submit.attempt, submit.is_resume) == (tuple(IDS[:4]), 1, True)
        assert not one.place.is_rounded

    run(tmp_path, story)


def test_outputs_of_an_earlier_attempt_are_dropped(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        first = world.place_of(one)
        other = "b" if first == "a" else "a"
        # The sequence moves to the other engine and back, over the same connection to the first engine.
        world.cores[first].is_draining = True
        world.cores[first].send_status()
        await until(lambda: one.place.engine == other)
        await until(lambda: world.cores[first].aborts == ["s"])
        world.cores[first].is_draining = False
        world.cores[first].send_status()
        await until(lambda: world.is_known(first))
        world.cores[other].die()
        await until(lambda: one.place.engine == first)
        assert one.place.attempt == 2
        for late in (0, 1):
            world.cores[first].send_output(SequenceOutput(sequence_id="s", token_ids=(99,), attempt=late))
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS

    run(tmp_path, story)


def test_a_full_engine_is_passed_over_and_only_all_of_them_refuse(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["a"].refusal = ("queue_full", "a is full")
        made = [sequence(f"s{number}") for number in range(4)]
        for one in made:
            world.client.submit([one])
        for one in made:
            assert await ids_of(one) == IDS
        assert world.cores["a"].submits, "one of the four was sent there first"
        assert len(world.cores["b"].submits) == 4
        assert not any(submit.is_resume for submit in world.cores["b"].submits)
        world.cores["b"].refusal = ("queue_full", "b is full")
        last = sequence("last")
        world.client.submit([last])
        with pytest.raises(QueueFull, match="is full"):
            await ids_of(last)

    run(tmp_path, story)


def test_a_sequence_waits_for_an_engine_but_not_for_ever(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = sequence()
        world.client.submit([one])
        assert one.place.engine is None
        with pytest.raises(EngineDead, match=r"no engine could take the request within 0\.5 s"):
            await ids_of(one)
        assert not list(world.client.unfinished())

    run(tmp_path, story, engines=(), hold_s=0.5)


def test_sequences_that_wait_are_bounded_in_tokens(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        kept = sequence("kept", prompt_ids=(1,) * 600)
        world.client.submit([kept])
        with pytest.raises(QueueFull, match="requests with 600 tokens wait"):
            world.client.submit([sequence("refused", prompt_ids=(1,) * 401)])
        world.client.submit([sequence("fits", prompt_ids=(1,) * 400)])
        assert [one.sequence_id for one in world.client.unfinished()] == ["kept", "fits"]

    run(tmp_path, story, engines=())


def test_another_model_gets_nothing_and_the_request_ends_with_that_reason(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        for name in world.cores:
            world.change_model(name, content_hash="another")
        await until(lambda: all(link.fingerprint != FINGERPRINT for link in world.client.pool.links.values()))
        world.cores[world.place_of(one)].die()
        with pytest.raises(EngineDead, match="every engine now serves another model"):
            await ids_of(one)

    run(tmp_path, story)


def test_a_continuation_up_to_rounding_is_marked(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        first = world.place_of(one)
        other = "b" if first == "a" else "a"
        world.change_model(other, dtype="float32")
        await until(lambda: world.client.pool.links[other].fingerprint != FINGERPRINT)
        world.cores[first].die()
        await until(lambda: one.place.engine == other)
        assert one.place.is_rounded
        world.cores[other].release()
        assert await ids_of(one) == IDS

    run(tmp_path, story)


def test_a_sequence_whose_engines_are_lost_again_and_again_is_ended(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for core in world.cores.values():
            core.is_silent = True
        one = sequence()
        world.client.submit([one])
        engines = []
        while list(world.client.unfinished()):
            await until(lambda: one.place.engine is not None)
            engines.append(world.place_of(one))
            num_losses = one.place.num_losses
            world.cores[engines[-1]].die()
            await until(lambda: one.place.num_losses > num_losses)  # noqa: B023
        with pytest.raises(PoisonousRequest, match="6 engines in a row"):
            await ids_of(one)
        assert len(engines) == engine_choice.MOST_LOSSES
        assert engines[0] != engines[1]
        assert len(set(engines[1:])) == 1, "after two losses only its last engine gets it"

    run(tmp_path, story)


def test_an_engine_whose_statuses_stay_out_gets_nothing_although_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "SUSPECT_AFTER_S", 0.2)

    async def story(world: World) -> None:
        world.cores["a"].is_mute = True
        await until(lambda: not world.client.pool.usable())
        assert not world.client.is_core_serving
        one = sequence()
        world.client.submit([one])
        assert one.place.engine is None
        world.cores["a"].send_status()
        assert await ids_of(one) == IDS

    run(tmp_path, story, engines=("a",))


def test_an_engine_that_rebuilds_for_long_gives_its_sequences_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_client, "REBUILD_PATIENCE_S", 1.5)

    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        first = world.place_of(one)
        world.cores[first].state = "recovering"
        world.cores[first].send_status()
        await until(lambda: not world.client.pool.links[first].is_serving)
        assert one.place.engine == first, "an engine that rebuilds keeps its sequences at first"
        await until(lambda: one.place.engine not in (None, first))
        assert one.place.num_losses == 1
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS

    run(tmp_path, story)


def test_an_engine_that_is_no_longer_listed_gives_its_sequences_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        made = [sequence(f"s{number}") for number in range(4)]
        for one in made:
            world.client.submit([one])
        await until(lambda: all(len(one.generated_ids) == 4 for one in made))
        assert {one.place.engine for one in made} == {"a", "b"}
        world.client.set_engines({"b": world.address("b")})
        assert {one.place.engine for one in made} == {"b"}
        world.cores["b"].release()
        for one in made:
            assert await ids_of(one) == IDS
        world.client.set_engines({"a": world.address("a"), "b": world.address("b")})
        await until(lambda: len(world.client.pool.usable()) == 2)

    run(tmp_path, story)


def test_the_record_of_a_loss_counts_the_requests_that_waited_for_the_only_engine(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = await held_after_four_ids(world)
        world.cores["a"].die()
        world.cores["a"].release()
        assert await ids_of(one) == IDS
        (record,) = world.client.recoveries.recoveries
        assert record.seconds is not None
        assert record.replayed_requests == 1

    run(tmp_path, story, engines=("a",))


def test_a_sequence_goes_only_where_it_fits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        core = world.cores["a"]
        assert core.model is not None
        core.model = msgspec.structs.replace(core.model, max_model_len=50)
        core.send_status()
        await until(lambda: world.client.pool.links["a"].max_model_len == 50)
        made = [sequence(f"s{number}", max_tokens=49) for number in range(6)]  # 2 + 49 tokens
        for one in made:
            world.client.submit([one])
        assert {one.place.engine for one in made} == {"b"}

    run(tmp_path, story)


def test_embeddings_go_only_to_engines_that_take_them_and_move_with_their_sequence(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        core = world.cores["c"]
        assert core.model is not None
        core.model = msgspec.structs.replace(core.model, hidden_size=0)
        core.send_status()
        await until(lambda: world.client.pool.links["c"].hidden_size == 0)
        world.hold(4)
        prompt = EmbeddedPrompt(Embeds("float32", 4, bytes(32)))
        made = [sequence(f"s{number}", prompt_ids=prompt) for number in range(6)]
        for one in made:
            world.client.submit([one])
        assert "c" not in {one.place.engine for one in made}
        await until(lambda: all(len(one.generated_ids) == 4 for one in made))
        world.cores["a"].die()
        await until(lambda: all(one.place.engine == "b" for one in made))
        for core in world.cores.values():
            core.release()
        for one in made:
            assert await ids_of(one) == IDS
        submits = world.cores["b"].submits
        assert {submit.sequence_id for submit in submits} == {one.sequence_id for one in made}
        assert {submit.embeds for submit in submits} == {prompt.embeds}

    run(tmp_path, story, engines=("a", "b", "c"))


def test_embeddings_that_no_engine_takes_any_more_are_refused_with_the_setting(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = sequence(prompt_ids=EmbeddedPrompt(Embeds("float32", 4, bytes(32))))
        assert world.client.pool.why_none(one) is None
        for core in world.cores.values():
            assert core.model is not None
            core.model = msgspec.structs.replace(core.model, hidden_size=0)
            core.send_status()
        await until(lambda: all(link.hidden_size == 0 for link in world.client.pool.links.values()))
        assert world.client.pool.why_none(sequence("ids")) is None
        world.client.submit([one])
        with pytest.raises(EngineDead, match=r"prompt_embeds is no longer enabled .* with --enable-prompt-embeds"):
            await ids_of(one)

    run(tmp_path, story)


def test_the_load_is_spread_and_the_books_are_empty_at_the_end(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        made = [sequence(f"s{number}", prompt_ids=tuple(range(1 + number % 3))) for number in range(20)]
        for one in made:
            world.client.submit([one])
        await until(lambda: all(len(one.generated_ids) == 4 for one in made))
        tokens = {"a": 0, "b": 0}
        for one in made:
            tokens[world.place_of(one)] += len(one.prompt_ids)
        assert sum(tokens.values()) == 39
        assert abs(tokens["a"] - tokens["b"]) <= 3, "the longest prompt"
        for one in made[:5]:
            world.client.abort(one.sequence_id)
        for core in world.cores.values():
            core.release()
        for one in made[5:]:
            assert await ids_of(one) == IDS
        estimates = [link.estimate for link in world.client.pool.links.values()]
        numbers = [(each.outstanding_prefill_tokens, each.num_decodes, each.num_sequences) for each in estimates]
        assert numbers == [(0, 0, 0), (0, 0, 0)]

    run(tmp_path, story)
