"""Short prompts get a part of each step while a long prompt is computed. Blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.overtaking import Line
from rayloom_engine.core.planning.short_prompts import ShortPrompts, kept_for_short_prompts
from rayloom_engine.core.scheduler import Scheduler
from rt_scheduler import SimulatedRank, expected_ids, finish_order, ids_of, make_scheduler, make_sequence, run_to_end


def _steps(scheduler: Scheduler, rank: SimulatedRank, num: int) -> list[dict[int, int]]:
    """Runs the next `num` plans and applies their results. Returns slot -> number of tokens, for each plan."""
    steps = []
    for _ in range(num):
        plan = scheduler.schedule()
        assert plan is not None
        steps.append({step.slot: step.num_tokens for step in plan.slots})
        scheduler.update(rank.run(plan))
        scheduler.check_integrity()
    return steps


@pytest.mark.parametrize(
    ("num_left", "num_prompt_tokens", "expected"),
    [
        (1000, 100, ShortPrompts(most_left=250, num_tokens=50)),
        (101, 100, ShortPrompts(most_left=25, num_tokens=50)),
        (100, 100, None),  # this step completes the prompt
        (1000, 1, None),  # one token cannot be divided
        (3, 2, None),  # no prompt has a quarter of 3 tokens
    ],
)
def test_half_a_step_is_kept_for_prompts_of_a_quarter_of_the_first(num_left, num_prompt_tokens, expected) -> None:
    assert kept_for_short_prompts(num_left, num_prompt_tokens) == expected


def test_a_short_prompt_waits_a_few_steps_for_a_long_one() -> None:
    """Of 8 tokens a step, 4 are for the short prompt of 10: its steps have 4, 4 and 2 of its tokens."""
    scheduler, rank = make_scheduler(60, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    assert _steps(scheduler, rank, 1) == [{0: 8}]
    scheduler.add(make_sequence("short", prompt=[7] * 10, max_tokens=1))
    assert _steps(scheduler, rank, 4) == [{1: 4, 0: 4}, {1: 4, 0: 4}, {1: 2, 0: 6}, {0: 8}]


def test_without_a_short_prompt_the_long_one_gets_the_whole_step() -> None:
    scheduler, rank = make_scheduler(60, max_num_seqs=8), SimulatedRank()
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, prompt=[ord(name[0])] * 60, max_tokens=1))
    assert _steps(scheduler, rank, 3) == [{0: 8}, {0: 8}, {0: 8}]


def test_a_prompt_is_short_if_all_but_a_few_of_its_tokens_are_cached() -> None:
    scheduler, rank = make_scheduler(80, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("before", prompt=[5] * 48, max_tokens=1))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("other", prompt=[6] * 51, max_tokens=1))
    scheduler.add(make_sequence("cached", prompt=[5] * 48 + [6] * 3, max_tokens=1))
    assert _steps(scheduler, rank, 1) == [{1: 3, 0: 5}], "3 tokens are not cached"
    assert finish_order(run_to_end(scheduler, rank)) == ["long", "other"]


def test_running_short_prompts_come_before_waiting_ones() -> None:
    scheduler, rank = make_scheduler(60, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    _steps(scheduler, rank, 1)
    for name in ("x", "y"):
        scheduler.add(make_sequence(name, prompt=[ord(name)] * 6, max_tokens=1))
    assert _steps(scheduler, rank, 3) == [{1: 4, 0: 4}, {1: 2, 2: 2, 0: 4}, {2: 4, 0: 4}]


def test_short_prompts_leave_running_prompts_the_blocks_that_these_need() -> None:
    """Of 45 blocks the long prompt needs 25. A short sequence needs 11, of which 10 are cached, and 14 at its end.

    Three short sequences would need 42 blocks beside the long prompt, so they run one after the other.
    """
    scheduler, rank = make_scheduler(45, max_num_seqs=16), SimulatedRank()
    for number in range(3):
        scheduler.add(make_sequence(f"before {number}", prompt=[number] * 40, max_tokens=1))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    _steps(scheduler, rank, 1)
    for number in range(3):
        scheduler.add(make_sequence(f"{number}", prompt=[number] * 40 + [9] * 3, max_tokens=12))
    assert finish_order(run_to_end(scheduler, rank))[0] == "0"
    assert scheduler.counters.num_preemptions == 0


def test_later_short_prompts_wait_once_max_num_seqs_have_overtaken_another_prompt() -> None:
    scheduler, rank = make_scheduler(100, max_num_seqs=2), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(200), max_tokens=1))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("middle", prompt=[9] * 100, max_tokens=1))
    for number in range(3):
        scheduler.add(make_sequence(f"{number}", prompt=[number] * 2, max_tokens=1))
    assert finish_order(run_to_end(scheduler, rank)) == ["0", "1", "long", "2", "middle"]


def test_a_prompt_that_is_not_short_is_overtaken_by_max_num_seqs_short_ones_at_most() -> None:
    line = Line(max_overtakers=2)
    middle, short = make_sequence("m", prompt=range(60)), make_sequence("s", prompt=range(2))
    line.hold_for_tokens(middle)
    for _ in range(2):
        assert line.may_pass(short) and not line.is_closed
        line.passed(short)
    assert line.is_closed and not line.may_pass(short)
    next_step = Line(max_overtakers=2)
    next_step.hold_for_tokens(middle)
    assert next_step.is_closed, "the number is kept from step to step"


@settings(deadline=None, print_blob=True)
@given(
    arrivals=st.lists(
        st.tuples(st.one_of(st.integers(1, 12), st.integers(40, 120)), st.integers(1, 4), st.integers(0, 20)),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(32, 60),
)
def test_the_first_prompt_gets_at_least_half_of_each_steps_prompt_tokens(
    arrivals: Sequence[tuple[int, int, int]], num_blocks: int
) -> None:
    """Arrivals are (prompt, tokens, step of arrival). The first prompt is the running one that arrived first."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=5, max_num_batched_tokens=16)
    rank, outputs = SimulatedRank(), []
    step = 0
    while scheduler.has_unfinished or step <= 20:
        for number, (num_prompt, num_tokens, at_step) in enumerate(arrivals):
            if at_step == step:
                scheduler.add(make_sequence(f"{number}", prompt=[number] * num_prompt, max_tokens=num_tokens))
        first = next((s for s in scheduler.running() if s.num_tokens - s.num_computed > 1), None)
        num_left = first.num_tokens - first.num_computed if first else 0
        plan = scheduler.schedule()
        step += 1
        assert step < 3000, "starved"
        if plan is None:
            continue
        chunks = {each.slot: each.num_tokens for each in plan.slots if each.num_tokens > 1}
        if first is not None and first.slot is not None and first.slot not in plan.freed_slots:
            own = next((each.num_tokens for each in plan.slots if each.slot == first.slot), 0)
            others = sum(chunks.values()) - chunks.get(first.slot, 0)
            assert own == num_left or own >= others or scheduler.pool.num_free == 0
        outputs += scheduler.update(rank.run(plan))
        scheduler.check_integrity()
    for number, (num_prompt, num_tokens, _) in enumerate(arrivals):
        assert ids_of(outputs, f"{number}") == expected_ids([number] * num_prompt, num_tokens)
