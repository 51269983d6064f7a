"""A gateway's sequences after refusals, changes of the list of engines and changes of the model: none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.errors import EngineDead
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


def test_a_held_request_is_not_given_to_another_model_although_the_text_has_changed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one = sequence()
        one.place.fingerprint = FINGERPRINT  # of the model whose tokenizer made the prompt
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
