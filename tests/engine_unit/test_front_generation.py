"""The start of a request with many sequences: the front serves other requests in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rayloom_engine.front.generation.generation import LANES_AT_ONCE, Generation
from rayloom_engine.front.http.tenant import Caller
from rayloom_engine.sampling_params import SamplingParams
from rt_front import FrontUnderTest, running_front


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.mark.parametrize(("num_prompts", "n"), [(8, 128), (1024, 1)])
def test_other_requests_run_while_1024_sequences_are_made(front: FrontUnderTest, num_prompts: int, n: int) -> None:
    stops = tuple(f"{number:02}{'a' * 62}" for number in range(64))  # the largest allowed number and length

    async def turns_of_others() -> int:
        text = front.service.text
        assert text is not None
        starting = asyncio.create_task(
            Generation.start(
                front.service,
                text,
                request_id="many",
                prompts=[(65,)] * num_prompts,
                params=SamplingParams(n=n, stop=stops),
                caller=Caller(),
                fresh_seed=1,
            )
        )
        turns = 0
        while not starting.done():
            turns += 1
            await asyncio.sleep(0)
        (await starting).close()
        return turns

    assert front.run(turns_of_others()) >= 1024 // LANES_AT_ONCE
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0


def test_a_refused_request_has_no_latency(front: FrontUnderTest) -> None:
    def num_measured() -> int:
        return front.do(lambda: front.service.metrics.request_s.cumulative()["+Inf"])

    assert front.complete("Hi", max_tokens=1).status_code == 200
    front.wait_until(lambda: front.service.lifecycle.num_in_flight == 0, "nothing is in flight")
    before = num_measured()
    refused = front.complete("Hi", stop_token_ids=[10_000])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_token_ids")
    assert num_measured() == before > 0


def test_choices_have_seeds_of_their_own_and_are_else_equal(front: FrontUnderTest) -> None:
    params = SamplingParams(n=3, seed=-5, logit_bias={7: 1.0})

    async def start() -> Generation:
        text = front.service.text
        assert text is not None
        generation = await Generation.start(
            front.service, text, request_id="three", prompts=[(65, 66)], params=params, caller=Caller(), fresh_seed=1
        )
        generation.close()
        return generation

    front.do(lambda: setattr(front.core, "hold_after", 0))
    generation = front.run(start())
    front.do(lambda: setattr(front.core, "hold_after", None))
    found = [lane.sequence.params for lane in generation._lanes]
    assert found == [params.decoding(choice, 2, 512, 300, 1) for choice in range(3)]
