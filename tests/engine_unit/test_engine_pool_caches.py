"""A gateway sends a request to the engine that has cached its prefix, according to the reports of (fake) cores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rayloom_engine.core.block_hash import prompt_hashes
from rayloom_engine.core.load import SchedulerLoad, TenantLoad
from rayloom_engine.errors import QueueFull, RequestError
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.prompt_blocks import prompt_blocks
from rayloom_engine.front.core_link.sequences import ClientSequence, in_turns_of_keys
from rt_engine_pool import IDS, World, ids_of, run, sequence, until
from rt_fake_core import BLOCK_SIZE

PREFIX = tuple(range(64))  # four blocks


def hashes_of(prompt_ids: tuple[int, ...], cache_key: bytes = b"") -> list[bytes]:
    return prompt_hashes(prompt_ids, BLOCK_SIZE, cache_key)


def one_with(number: int, prefix: tuple[int, ...] = PREFIX) -> ClientSequence:
    """A sequence with a prompt that begins with `prefix` and has 3 tokens of its own."""
    return sequence(f"s{number}", prompt_ids=(*prefix, 200 + number, 1, 2))


def num_cached(client: CoreClient, name: str) -> int:
    return len(client.pool.links[name].estimate.index)


def test_a_request_goes_where_its_prefix_is(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for name in ("b", "a"):  # without caches, the tie key would choose the same engine for both
            prefix = tuple(range(1000, 1064)) if name == "a" else PREFIX
            world.cores[name].cache(hashes_of(prefix))
            await until(lambda: num_cached(world.client, name) == 4)  # noqa: B023
            for number in range(3):
                one = one_with(number, prefix)
                world.client.submit([one])
                assert one.place.engine == name
                assert await ids_of(one) == IDS

    run(tmp_path, story)


def test_blocks_of_a_refused_prompt_attract_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for core in world.cores.values():
            core.refusal = ("queue_full", "full")
        one = one_with(0)
        world.client.submit([one])
        with pytest.raises(QueueFull):
            await ids_of(one)
        assert one.prompt_blocks is not None
        blocks = one.prompt_blocks.of_size(BLOCK_SIZE)
        assert len(blocks) == 4
        assert [link.estimate.cached_tokens(blocks) for link in world.client.pool.links.values()] == [0, 0]

    run(tmp_path, story)


def test_a_prefix_attracts_only_as_far_as_it_saves_more_than_waiting_costs(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["b"].cache(hashes_of(PREFIX))
        # The prompt has 67 tokens, and b has 64 of them in its cache. Engine a would compute 67 tokens. Engine b would
        # compute 63 or 65 waiting tokens first, and then 3 tokens of the prompt.
        for waiting, engine in ((63, "b"), (65, "a")):
            load = SchedulerLoad(tenants=(TenantLoad(tenant="", prefill_tokens=waiting),))
            world.cores["b"].load = load
            world.cores["b"].send_load()
            await until(lambda: world.client.pool.links["b"].estimate.load == load)  # noqa: B023
            one = one_with(waiting)
            world.client.submit([one])
            assert one.place.engine == engine
            await ids_of(one)

    run(tmp_path, story)


def test_the_measured_cost_of_a_decode_decides(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["b"].cache(hashes_of(PREFIX))
        # The score of a is 67. The score of b is 3 plus 10 decodes at the mean cost of both engines.
        for cost, engine in ((6.0, "b"), (7.0, "a")):
            for name, num_decodes in (("a", 0), ("b", 10)):
                load = SchedulerLoad(num_decodes=num_decodes, decode_token_cost=cost)
                world.cores[name].load = load
                world.cores[name].send_load()
                await until(lambda: world.client.pool.links[name].estimate.load == load)  # noqa: B023
            one = one_with(int(cost))
            world.client.submit([one])
            assert one.place.engine == engine
            await ids_of(one)

    run(tmp_path, story)


def test_the_prompts_of_one_request_are_divided_between_engines(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cores["b"].load = SchedulerLoad(num_decodes=1, decode_token_cost=2.0)
        world.cores["b"].send_load()
        await until(lambda: world.client.pool.links["b"].estimate.load.num_decodes == 1)
        for core in world.cores.values():
            core.is_silent = True
        prompts = [tuple(range(100 * number, 100 * number + 100)) for number in range(4)]
        many = [sequence(f"s{number}", prompt_ids=prompt) for number, prompt in enumerate(prompts)]
        world.client.submit(many)
        # the decode counts as 2 tokens, less than the 100 tokens of a prompt that was sent before
        assert [one.place.engine for one in many] == ["a", "b", "a", "b"]

    run(tmp_path, story)


def test_the_prompts_of_a_request_that_cannot_wait_count_nowhere(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        too_long = sequence("long", prompt_ids=(1,) * 2000)
        with pytest.raises(QueueFull, match="no engine can take the request"):
            world.client.submit([sequence("short"), too_long])
        estimates = [link.estimate for link in world.client.pool.links.values()]
        assert [(each.num_sequences, each.outstanding_prefill_tokens) for each in estimates] == [(0, 0)] * 2
        assert not list(world.client.unfinished())

    run(tmp_path, story)


def test_sequences_that_cannot_be_encoded_count_nowhere(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        broken = sequence("broken", prompt_ids=(3, 4))
        broken.priority = 2**65  # more than 64 bits
        with pytest.raises(RequestError, match="cannot be handed to the engine"):
            world.client.submit([sequence("good"), broken])
        lost = sequence("lost")
        for core in world.cores.values():
            core.is_draining = True
            core.send_status()
        await until(lambda: not world.client.is_core_serving)
        world.client.submit([lost])
        lost.priority = 2**65
        world.cores["a"].is_draining = False
        world.cores["a"].send_status()
        with pytest.raises(RequestError, match="cannot be handed to the engine"):
            await ids_of(lost)
        estimates = [link.estimate for link in world.client.pool.links.values()]
        assert [(each.num_sequences, each.outstanding_prefill_tokens) for each in estimates] == [(0, 0)] * 2
        assert not list(world.client.unfinished())

    run(tmp_path, story)


def test_a_full_queue_does_not_refuse_sequences_of_an_answer_that_has_begun(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for core in world.cores.values():
            core.is_draining = True
            core.send_status()
        await until(lambda: not world.client.is_core_serving)
        with pytest.raises(QueueFull):
            world.client.submit([sequence("new", prompt_ids=(1,) * 2000)])
        step = sequence("step", prompt_ids=(2,) * 2000, max_tokens=len(IDS))
        world.client.submit([step], is_accepted=True)
        for core in world.cores.values():
            assert core.model is not None
            core.model = msgspec.structs.replace(core.model, max_model_len=4096)
            core.is_draining = False
            core.send_status()
        assert await ids_of(step) == IDS
        (submit,) = (submit for core in world.cores.values() for submit in core.submits)
        assert submit.is_resume, "the queue of an engine may be full, too"

    run(tmp_path, story)


def test_requests_with_one_new_prefix_meet_before_a_core_publishes_it(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        engines = set()
        for first in range(0, 1200, 100):
            prefix = tuple(range(first, first + 64))
            made = [one_with(first + number, prefix) for number in range(4)]
            for one in made:
                world.client.submit([one])
                await ids_of(one)
            assert len({one.place.engine for one in made}) == 1
            engines.add(made[0].place.engine)
        assert engines == {"a", "b"}, "each prefix has its own place in the order of ties"

    run(tmp_path, story)


def test_the_index_of_a_core_that_restarts_is_forgotten(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for name in ("a", "b"):
            world.cores[name].cache(hashes_of(PREFIX))
            await until(lambda: num_cached(world.client, name) == 4)  # noqa: B023
        world.cores["a"].die()
        await until(lambda: world.cores["a"].num_index_requests == 2 and world.is_known("a"))
        assert (num_cached(world.client, "a"), num_cached(world.client, "b")) == (0, 4)
        one = one_with(0)
        world.client.submit([one])
        assert one.place.engine == "b"

    run(tmp_path, story)


def test_a_gap_makes_the_gateway_ask_again_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        core = world.cores["b"]
        first, *others = hashes_of(PREFIX)
        core.cache([first], is_told=False)
        for block in others:  # the first message reveals the gap; the later messages arrive before the whole index
            core.cache([block])
        await until(lambda: num_cached(world.client, "b") == 4)
        assert core.num_index_requests == 2, "one at the beginning"
        core.cache(hashes_of(tuple(range(5, 5 + BLOCK_SIZE))))
        await until(lambda: num_cached(world.client, "b") == 5)
        assert core.num_index_requests == 2

    run(tmp_path, story)


def test_blocks_are_those_of_the_core_and_choices_share_them(tmp_path: Path) -> None:
    prompt = (*PREFIX, 1)
    blocks = prompt_blocks(prompt, BLOCK_SIZE, keys=(b"key", b""), otherwise=b"request")
    expected = hashes_of(prompt, b"key")
    assert blocks.of_size(BLOCK_SIZE) == tuple(int.from_bytes(each[:8], "little") for each in expected)
    assert blocks.of_size(32) == ()
    assert blocks.tie_key == expected[3]
    assert prompt_blocks((1, 2), BLOCK_SIZE, keys=(b"", b""), otherwise=b"request").tie_key == b"request"
    assert prompt_blocks(prompt, BLOCK_SIZE, keys=(b"", b""), otherwise=b"", is_shared=False).hashes == ()
    unknown = prompt_blocks(prompt, 0, keys=(b"key", b""), otherwise=b"request")
    assert (unknown.hashes, unknown.tie_key) == ((), expected[3])

    async def story(world: World) -> None:
        made = [one_with(0), one_with(1)]
        made[1].prompt_ids = made[0].prompt_ids
        world.client.submit(made)
        assert made[0].prompt_blocks is not None
        assert made[1].prompt_blocks is made[0].prompt_blocks

    run(tmp_path, story)


def test_held_requests_are_taken_in_turns_of_keys() -> None:
    def made(name: str, tenant: str, arrival: float, engine: str | None = None) -> ClientSequence:
        one = sequence(name)
        one.tenant, one.arrival, one.place.engine = tenant, arrival, engine
        return one

    flood = [made(f"f{number}", "flood", float(number)) for number in range(3)]
    late = [made(f"l{number}", "late", 10.0 + number) for number in range(2)]
    placed = [made("p", "late", 0.0, "a")]
    order = in_turns_of_keys([*flood, *late], [*placed, *flood, *late])
    assert [one.sequence_id for one in order] == ["f0", "f1", "l0", "f2", "l1"]  # positions 0, 1, 1, 2, 2
