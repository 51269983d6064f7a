"""A gateway's sequences whose LoRA adapter an engine cannot load: other engines, waits, and the end of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.errors import AdapterFailed
from rayloom_engine.front.core_link.sequences import ClientSequence
from rt_engine_pool import IDS, World, ids_of, run, until
from rt_fake_core import FakeCore
from rt_gateway_adapters import POEMS, SQL, tell, told, with_adapter


def test_a_request_whose_adapter_an_engine_cannot_load_is_computed_by_another_with_the_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(SQL,), b=(SQL,), c=(POEMS,))
        world.hold(3)
        one = with_adapter(SQL)
        world.client.submit([one])
        first = world.place_of(one)
        await until(lambda: len(one.generated_ids) == 3)
        other = {"a": "b", "b": "a"}[first]
        world.cores[first].refuse("s", "adapter", "the files of the adapter have changed")
        await until(lambda: one.place.engine == other)
        for core in world.cores.values():
            core.release()
        assert await ids_of(one) == IDS
        assert world.cores[other].submits[-1].generated_ids == tuple(IDS[:3])
        assert world.cores["c"].submits == []

    run(tmp_path, story, engines=("a", "b", "c"))


def test_a_request_whose_adapter_no_engine_can_load_fails_with_the_cause(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await told(world, a=(SQL,), b=(SQL,), c=(POEMS,))
        for core in world.cores.values():
            core.refusal = ("adapter", "the files of the adapter have changed")
        one = with_adapter(SQL)
        world.client.submit([one])
        with pytest.raises(AdapterFailed, match="files of the adapter have changed"):
            await ids_of(one)
        assert {name: len(core.submits) for name, core in world.cores.items()} == {"a": 1, "b": 1, "c": 0}

    run(tmp_path, story, engines=("a", "b", "c"))


async def refused_while_the_other_is_away(world: World, is_full: bool = False) -> tuple[ClientSequence, FakeCore]:
    """A sequence whose engine cannot load its adapter, while the only other engine with the adapter is not usable."""
    await told(world, a=(SQL,), b=(SQL,), c=(POEMS,))
    world.hold(3)
    one = with_adapter(SQL)
    world.client.submit([one])
    first = world.place_of(one)
    await until(lambda: len(one.generated_ids) == 3)
    other = {"a": "b", "b": "a"}[first]
    if is_full:
        one.place.refused_by.add(other)
    else:
        world.cores[other].state = "recovering"
        world.cores[other].send_status()
        await until(lambda: not world.client.pool.links[other].is_serving)
    world.cores[first].refuse("s", "adapter", "the files of the adapter have changed")
    await until(lambda: one.place.engine != first)
    return one, world.cores[other]


def test_a_request_whose_adapter_an_engine_cannot_load_waits_for_another_with_the_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one, other = await refused_while_the_other_is_away(world)
        assert one.place.engine is None
        other.state = "serving"
        other.send_status()
        other.release()
        assert await ids_of(one) == IDS
        assert other.submits[-1].generated_ids == tuple(IDS[:3])
        assert world.cores["c"].submits == []

    run(tmp_path, story, engines=("a", "b", "c"))


def test_a_full_queue_does_not_end_a_request_whose_adapter_an_engine_cannot_load(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        one, other = await refused_while_the_other_is_away(world, is_full=True)
        other.release()
        assert await ids_of(one) == IDS
        assert other.submits[-1].is_resume, "this engine must accept the sequence"

    run(tmp_path, story, engines=("a", "b", "c"))


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the list", "unloads the adapter"])
def test_a_request_that_waits_for_its_adapter_fails_with_the_cause_when_no_engine_is_left(
    leaves: bool, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        one, other = await refused_while_the_other_is_away(world)
        if leaves:
            left = [name for name, core in world.cores.items() if core is not other]
            world.client.set_engines({name: world.address(name) for name in left})
        else:
            tell(other)
        with pytest.raises(AdapterFailed, match="files of the adapter have changed"):
            await ids_of(one)
        assert world.cores["c"].submits == []

    run(tmp_path, story, engines=("a", "b", "c"))
