"""A gateway's sequences after refusals, changes of the list of engines and changes of the model: none is lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rayloom_engine.errors import CorruptLogits, EngineDead
from rt_engine_pool import IDS, World, ids_of, run, sequence, until
from rt_fake_core import FINGERPRINT


def test_an_engine_that_was_full_gets_a_sequence_whose_engine_is_lost(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        world.cores["a"].refusal = ("queue_full", "full")
        sequences = [sequence(str(number)) for number in range(4)]
        world.client.submit(sequences)
        await until(lambda: all(len(each.generated_ids) == 4 for each in sequences))
        assert any(each.place.refused_by == {"a"} for each in sequences)
        world.cores["a"].refusal = None
        world.cores["b"].die()
        await until(lambda: all(each.place.engine == "a" for each in sequences))
        world.cores["a"].release()
        assert [await ids_of(each) for each in sequences] == [IDS] * 4

    run(tmp_path, story)


def test_a_sequence_whose_logits_are_not_finite_is_computed_by_another_engine(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["a"].refusal = ("corrupt", "not finite")
        made = [sequence(str(number)) for number in range(4)]
        for one in made:
            world.client.submit([one])
        assert [await ids_of(one) for one in made] == [IDS] * 4
        assert world.cores["a"].submits, "one of the four was sent there first"

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("engines", "num_asked"),
    [(("a", "b"), [1, 1]), (("a", "b", "c", "d"), [0, 1, 1, 1])],
    ids=["each of two", "three of four"],
)
def test_a_sequence_fails_whose_logits_no_asked_engine_can_compute(
    engines: tuple[str, ...], num_asked: list[int], tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        for core in world.cores.values():
            core.refusal = ("corrupt", "not finite")
        one = sequence()
        world.client.submit([one])
        with pytest.raises(CorruptLogits, match="not finite"):
            await ids_of(one)
        assert sorted(len(core.submits) for core in world.cores.values()) == num_asked

    run(tmp_path, story, engines=engines)


def test_two_broken_engines_of_four_fail_no_sequence(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for name in ("a", "b"):
            world.cores[name].refusal = ("corrupt", "not finite")
        made = [sequence(str(number)) for number in range(20)]
        for one in made:
            world.client.submit([one])
        assert [await ids_of(one) for one in made] == [IDS] * 20
        assert world.cores["a"].submits or world.cores["b"].submits

    run(tmp_path, story, engines=("a", "b", "c", "d"))


def test_after_a_broken_release_the_engines_of_another_release_are_asked(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        broken = ("a", "b", "c")
        for name in broken:
            world.cores[name].refusal = ("corrupt", "not finite")
            world.change_model(name, engine_version="9.0")
        links = world.client.pool.links
        await until(lambda: all(links[name].fingerprint != FINGERPRINT for name in broken))
        made = [sequence(str(number)) for number in range(12)]
        for one in made:
            world.client.submit([one])
        assert [await ids_of(one) for one in made] == [IDS] * 12
        assert sum(len(world.cores[name].submits) for name in broken) + len(world.cores["d"].submits) <= 24
        assert len(world.cores["d"].submits) == 12, "each sequence was asked of one broken engine at most"

    run(tmp_path, story, engines=("a", "b", "c", "d"))


def test_a_sequence_never_returns_to_an_engine_whose_logits_were_not_finite(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        first = sequence("first")
        world.client.submit([first])
        corrupt = world.place_of(first)
        other = {"a": "b", "b": "a"}[corrupt]
        await until(lambda: len(first.generated_ids) == 4)
        world.cores[corrupt].refuse("first", "corrupt", "not finite")
        await until(lambda: first.place.engine == other)
        world.cores[other].die()
        await until(lambda: not world.client.pool.links[other].is_connected)
        assert first.place.refused_by == set()
        assert (first.place.engine, set(first.place.corrupt_by)) == (None, {corrupt})
        world.client.abort("first")

    run(tmp_path, story)


def test_a_sequence_whose_logits_the_only_engine_cannot_compute_fails_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["a"].refusal = ("corrupt", "not finite")
        one = sequence()
        world.client.submit([one])
        with pytest.raises(CorruptLogits, match="not finite"):
            await ids_of(one)

    run(tmp_path, story, engines=("a",))


def test_engines_that_leave_the_list_are_no_losses_and_wait_for_nobody(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for core in world.cores.values():
            core.is_silent = True  # no token, as in a long prefill
        one = sequence()
        world.client.submit([one])
        both = {name: world.address(name) for name in world.cores}
        for _ in range(8):
            first = world.place_of(one)
            world.client.set_engines({name: both[name] for name in both if name != first})
            assert world.place_of(one) != first
            world.client.set_engines(both)
            await until(lambda: all(world.is_known(name) for name in both))
        assert one.place.num_losses == 0

    run(tmp_path, story)


def test_an_engine_that_leaves_the_list_keeps_the_sequences_that_no_other_one_can_take(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        kept = sequence("kept")
        world.client.submit([kept])
        await until(lambda: len(kept.generated_ids) == 4)
        pool = world.client.pool
        world.client.set_engines({"b": world.address("b")})  # engine b does not run
        held = sequence("held")
        world.client.submit([held])
        assert (kept.place.engine, held.place.engine) == ("a", None)
        world.cores["a"].release()
        assert await ids_of(kept) == IDS
        assert [submit.sequence_id for submit in world.cores["a"].submits] == ["kept"]
        await until(lambda: set(pool.links) == {"b"})
        world.client.set_engines({"a": world.address("a"), "b": world.address("b")})
        assert await ids_of(held) == IDS

    run(tmp_path, story, engines=("a",))


def test_an_engine_that_left_the_list_hands_over_as_soon_as_another_one_serves(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["b"].state = "starting"
        world.cores["b"].send_status()
        await until(lambda: not world.client.pool.links["b"].is_serving)
        world.hold(4)
        one = sequence()
        world.client.submit([one])
        await until(lambda: len(one.generated_ids) == 4)
        one.place.num_losses = 2  # from now on only its last engine may get the sequence
        world.client.set_engines({"b": world.address("b")})
        assert one.place.engine == "a"
        world.cores["b"].state = "serving"
        world.cores["b"].send_status()
        await until(lambda: one.place.engine == "b")
        assert one.place.num_losses == 2, "the engines that it may have killed still count"
        world.cores["b"].release()
        assert await ids_of(one) == IDS
        assert set(world.client.pool.links) == {"b"}

    run(tmp_path, story)


def test_an_engine_that_comes_back_to_the_list_gets_what_waits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        kept = sequence("kept")
        world.client.submit([kept])
        await until(lambda: len(kept.generated_ids) == 4)
        listed = {"a": world.address("a")}
        world.client.set_engines({})
        assert world.client.pool.links["a"].is_leaving
        waiting = sequence("waiting")
        world.client.submit([waiting])
        world.client.set_engines(listed)
        assert (kept.place.engine, kept.place.attempt, waiting.place.engine) == ("a", 0, "a")
        world.cores["a"].release()
        assert [await ids_of(each) for each in (kept, waiting)] == [IDS, IDS]

    run(tmp_path, story, engines=("a",))


def test_an_engine_that_left_the_list_and_ends_is_no_loss(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        one = sequence()
        world.client.submit([one])
        await until(lambda: len(one.generated_ids) == 4)
        world.client.set_engines({})
        world.cores["a"].die()
        await until(lambda: one.place.engine is None)
        assert one.place.num_losses == 0
        await until(lambda: not world.client.pool.links)

    run(tmp_path, story, engines=("a",))


def test_a_held_request_is_not_given_to_another_model_although_the_text_has_changed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = sequence()
        one.place.fingerprint = FINGERPRINT  # fingerprint of the model whose tokenizer made the prompt
        for core in world.cores.values():
            core.is_draining = True
            core.send_status()
        await until(lambda: not world.client.is_core_serving)
        world.client.submit([one])
        for name, core in world.cores.items():
            core.is_draining = False
            world.change_model(name, content_hash="another")
        await until(lambda: all(link.fingerprint != FINGERPRINT for link in world.client.pool.links.values()))
        world.client.pool.model = world.client.pool.links["a"].fingerprint
        with pytest.raises(EngineDead, match="another model"):
            await ids_of(one)

    run(tmp_path, story)


def test_a_choice_does_not_follow_the_other_choices_to_an_engine_whose_logits_were_not_finite(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        prompt_ids = (1, 2)
        one, refused = (sequence(name, prompt_ids=prompt_ids) for name in ("one", "refused"))
        world.client.submit([one, refused])
        corrupt = world.place_of(one)
        other = {"a": "b", "b": "a"}[corrupt]
        assert refused.place.engine == corrupt, "the choices of a prompt go to one engine"
        await until(lambda: len(one.generated_ids) == len(refused.generated_ids) == 4)
        world.cores[corrupt].refuse("refused", "corrupt", "not finite")
        await until(lambda: refused.place.engine == other)
        world.hold(6)
        world.cores[corrupt].die()
        await until(lambda: one.place.engine == other and len(one.generated_ids) == 6)
        await until(lambda: world.is_known(corrupt))
        world.cores[other].die()
        await until(lambda: one.place.engine == corrupt)
        assert refused.place.engine != corrupt
        for core in world.cores.values():
            core.release()
        assert await ids_of(refused) == IDS
        assert refused.place.num_losses == 0

    run(tmp_path, story)


def test_an_engine_that_restarts_with_another_release_continues_up_to_rounding(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        one = sequence()
        world.client.submit([one])
        await until(lambda: len(one.generated_ids) == 4)
        core = world.cores["a"]
        assert core.model is not None
        core.model = msgspec.structs.replace(
            core.model, fingerprint=msgspec.structs.replace(FINGERPRINT, engine_version="9.0")
        )
        core.die()
        core.release()
        assert await ids_of(one) == IDS
        assert one.place.is_rounded

    run(tmp_path, story, engines=("a",))


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_last_engine_that_ends_without_a_sequence_is_no_loss(is_listed: bool, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        core = world.cores["a"]
        core.is_draining = True
        core.send_status()
        await until(lambda: not world.client.is_core_serving)
        if is_listed:
            core.die()
            await until(lambda: len(core.hellos) == 2)
        else:
            world.client.set_engines({})
        assert not world.client.recoveries.recoveries

    run(tmp_path, story, engines=("a",))


def test_a_held_request_fails_at_once_if_only_an_engine_that_leaves_has_its_model(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.hold(4)
        world.change_model("b", content_hash="another")
        await until(lambda: world.client.pool.links["b"].fingerprint != FINGERPRINT)
        kept = sequence("kept")
        world.client.submit([kept])
        await until(lambda: len(kept.generated_ids) == 4)
        world.client.set_engines({"b": world.address("b")})
        late = sequence("late")
        world.client.submit([late])
        with pytest.raises(EngineDead, match="every engine now serves another model"):
            await ids_of(late)
        assert kept.place.engine == "a"
        world.cores["a"].release()
        assert await ids_of(kept) == IDS

    run(tmp_path, story)
