"""The limit on a step's prompt tokens if contexts are long. This limit never makes short prompts wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.planning.chunking import FULL_BUDGET_CONTEXT, LEAST_CHUNK, chunk_size, largest_chunk
from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.step import SampledToken, StepResult
from rt_scheduler import make_scheduler, make_sequence

K = 1024


def _builder(*chunks: tuple[int, int], budget: int) -> StepBuilder:
    """A step builder whose step already has `chunks` of (start, tokens)."""
    builder = StepBuilder(budget=budget, max_decodes=64)
    for index, (start, num) in enumerate(chunks):
        sequence = make_sequence(f"s{index}", prompt=(1,))
        sequence.num_computed = start
        builder.num_tokens[sequence] = num
    return builder


@pytest.mark.parametrize(
    ("start", "num_tokens", "chunk"),
    [
        (0, 10_000, 512),
        (15 * K, 100_000, 512),  # the chunk ends below 16k
        (128 * K, 200 * K, LEAST_CHUNK),  # 64 x 128k = 512 x 16k; the chunk's own 64 tokens come on top
        (50_000, 100_000, 167),  # 167 x 50,167 <= 512 x 16,384 < 168 x 50,168
        (50_000, 50_100, 100),  # the rest of the prompt
        (50_000, 50_001, 1),
    ],
)
def test_a_chunk_shrinks_as_its_context_grows(start: int, num_tokens: int, chunk: int) -> None:
    assert chunk_size(start, num_tokens, _builder(budget=512), 512) == chunk


def test_a_second_long_context_gets_the_rest_of_the_first_and_a_short_one_its_whole_share() -> None:
    first = _builder((50_000, 167), budget=345)
    assert chunk_size(50_000, 100_000, first, 512) == 0
    assert chunk_size(50_000, 50_001, first, 512) == 1, "a decode"
    assert chunk_size(0, 300, first, 512) == 300
    # The first chunk uses 60 x 50,060 of 512 x 16,384. Of the remaining 5,385,008, 107 x 50,107 = 5,361,449 are used.
    tail = _builder((50_000, 60), budget=452)
    assert chunk_size(50_000, 100_000, tail, 512) == 107
    short = _builder((0, 300), (60_000, 1), budget=211)
    assert chunk_size(50_000, 100_000, short, 512) == 167


def test_a_window_bounds_the_context_and_so_leaves_the_chunk_whole() -> None:
    assert chunk_size(100_000, 200_000, _builder((90_000, 256), budget=256), 512, window=4096) == 256
    assert chunk_size(100_000, 200_000, _builder(budget=512), 512, window=50_000) == 167, "as after 50,000 tokens"


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 32))
def test_the_largest_chunk_fits_and_one_more_token_does_not(start: int, room: int) -> None:
    chunk = largest_chunk(start, room)
    assert chunk * (start + chunk) <= room < (chunk + 1) * (start + chunk + 1)


def test_a_long_prompt_is_computed_in_steps_of_bounded_attention_and_a_short_one_beside_it() -> None:
    budget, length = 256, FULL_BUDGET_CONTEXT + 2000
    scheduler = make_scheduler(num_blocks=length // 2, max_num_batched_tokens=budget)
    scheduler.add(make_sequence("long", prompt=[3] * length, max_tokens=1))
    costs = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        if len(costs) == 64:
            scheduler.add(make_sequence("short", prompt=[4] * 3, max_tokens=1))
        costs.append(sum(step.num_tokens * (step.start + step.num_tokens) for step in plan.slots))
        sampled = tuple(SampledToken(step.slot, 1) for step in plan.slots if step.samples)
        done = scheduler.update(StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled))
        if any(output.sequence_id == "short" for output in done):
            assert len(costs) == 66, "the step after it came"
        scheduler.check_integrity()
    assert max(costs) <= budget * FULL_BUDGET_CONTEXT + 3 * 3
    # 64 chunks of 256 tokens reach position 16,384. Of the remaining 2,000 tokens, the next chunk has 252, and each
    # later chunk has fewer. 8 steps compute 1,895 of these tokens, so a ninth step follows.
    assert len(costs) == 64 + 9
