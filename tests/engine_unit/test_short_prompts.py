"""Short prompts get a part of each step while a long prompt is computed. Blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.overtaking import Line
from rayloom_engine.core.planning.short_prompts import ShortPrompts, kept_for_short_prompts
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.step import StepResult
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
    ("num_left", "num_alone", "expected"),
    [
        (1000, 100, ShortPrompts(most_left=250, num_tokens=50)),
        (101, 100, ShortPrompts(most_left=25, num_tokens=50)),
        (100, 100, None),  # this step completes the prompt
        (1000, 1, None),  # one token cannot be divided
        (3, 2, None),  # no prompt has a quarter of 3 tokens
    ],
)
def test_half_a_step_is_kept_for_prompts_of_a_quarter_of_the_first(num_left, num_alone, expected) -> None:
    assert kept_for_short_prompts(num_left, num_alone) == expected


def test_a_short_prompt_waits_a_few_steps_for_a_long_one() -> None:
    """Of 8 tokens a step, 4 are for the short prompt of 10: its steps have 4, 4 and 2 of its tokens."""
    scheduler, rank = make_scheduler(60, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    assert _steps(scheduler, rank, 1) == [{0: 8}]
    scheduler.add(make_sequence("short", prompt=[7] * 10, max_tokens=1))
    assert _steps(scheduler, rank, 4) == [{1: 4, 0: 4}, {1: 4, 0: 4}, {1: 2, 0: 6}, {0: 8}]


def test_what_the_attention_of_a_long_context_leaves_of_a_step_is_for_short_prompts() -> None:
    """Attention limits the long prompt to the largest n with n x (60,000 + n) <= 512 x 16,384, which is 139."""
    scheduler = make_scheduler(
        5000, max_num_seqs=4, max_num_batched_tokens=512, block_size=16, max_model_len=80_000, max_queued=9
    )
    long = make_sequence("long", prompt=[5] * 70_000, max_tokens=1)
    scheduler.add(long)
    while long.num_computed < 60_000:
        plan = scheduler.schedule()
        scheduler.update(StepResult(step_id=plan.step_id, epoch=plan.epoch))
    scheduler.add(make_sequence("short", prompt=[6] * 2000, max_tokens=1))
    plan = scheduler.schedule()
    assert {step.slot: step.num_tokens for step in plan.slots} == {0: 139, 1: 512 - 139}


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


def test_a_waiting_prompt_that_lacks_blocks_is_overtaken_by_as_many_tokens_as_it_has() -> None:
    """The long prompt needs 25 of 32 blocks, the middle one 8, and one more must stay free: it lacks 2 blocks."""
    scheduler, rank = make_scheduler(32, max_num_seqs=16), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(100), max_tokens=1))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("middle", prompt=[9] * 30, max_tokens=1))
    for number in range(4):
        scheduler.add(make_sequence(f"{number}", prompt=[number] * 8, max_tokens=1))
    assert finish_order(run_to_end(scheduler, rank)) == ["0", "1", "2", "long", "middle", "3"], "3 x 8 <= 30 < 4 x 8"


def test_a_prompt_that_was_preempted_in_this_step_gets_no_tokens() -> None:
    """Two slots, and the second tenant has none: its sequence preempts the short prompt of the first tenant."""
    scheduler, rank = make_scheduler(100, max_num_seqs=2), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(200), max_tokens=1, tenant="x"))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("short", prompt=[7] * 10, max_tokens=1, tenant="x"))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("other", prompt=[8] * 2, max_tokens=1, tenant="y"))
    assert finish_order(run_to_end(scheduler, rank)) == ["other", "short", "long"]
    assert scheduler.counters.num_preemptions == 1


def test_short_prompts_take_at_most_half_of_their_tenants_share() -> None:
    """Two tenants share 8 tokens a step. The first tenant's half of its 4 is for its long prompt."""
    scheduler, rank = make_scheduler(400, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("long", prompt=range(400), max_tokens=1, tenant="x"))
    _steps(scheduler, rank, 1)
    scheduler.add(make_sequence("other", prompt=[9] * 400, max_tokens=1, tenant="y"))
    for number in range(10):
        scheduler.add(make_sequence(f"{number}", prompt=[100 + number] * 4, max_tokens=1, tenant="x"))
    assert [step[0] for step in _steps(scheduler, rank, 10)] == [2] * 10


LENGTHS = st.one_of(st.integers(1, 12), st.integers(40, 120))


@settings(deadline=None, print_blob=True)
@given(
    arrivals=st.lists(
        st.tuples(
            st.one_of(st.integers(1, 12), st.integers(40, 120)),
            st.integers(1, 4),
            st.integers(0, 20),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(32, 60),
)
def test_the_first_prompt_gets_at_least_half_of_what_it_would_get_alone(
    arrivals: Sequence[tuple[int, int, int, int]], num_blocks: int
) -> None:
    """Arrivals are (prompt, tokens, step of arrival, priority). The first prompt is the running one that came first."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=5, max_num_batched_tokens=16)
    rank, outputs = SimulatedRank(), []
    step = 0
    while scheduler.has_unfinished or step <= 20:
        for number, (num_prompt, num_tokens, at_step, priority) in enumerate(arrivals):
            if at_step == step:
                scheduler.add(
                    make_sequence(f"{number}", prompt=[number] * num_prompt, max_tokens=num_tokens, priority=priority)
                )
        prefills = [s for s in scheduler.running() if s.num_tokens - s.num_computed > 1]
        first = min(prefills, key=lambda sequence: sequence.number, default=None)
        num_left = first.num_tokens - first.num_computed if first else 0
        num_preemptions = scheduler.counters.num_preemptions
        plan = scheduler.schedule()
        step += 1
        assert step < 3000, "starved"
        if plan is None:
            continue
        if first is not None and scheduler.counters.num_preemptions == num_preemptions:
            of_slot = {each.slot: each.num_tokens for each in plan.slots}
            num_decodes = sum(num == 1 for slot, num in of_slot.items() if slot != first.slot)
            alone = min(num_left, 16 - num_decodes)
            is_next = first is min(prefills, key=lambda sequence: sequence.order)
            assert not is_next or 2 * of_slot.get(first.slot, 0) >= alone - 1 or scheduler.pool.num_free == 0
        outputs += scheduler.update(rank.run(plan))
        scheduler.check_integrity()
    for number, (num_prompt, num_tokens, _, _) in enumerate(arrivals):
        assert ids_of(outputs, f"{number}") == expected_ids([number] * num_prompt, num_tokens)
