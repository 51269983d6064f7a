"""Several plans in flight: their order, the sequences that they do not contain, and their equal sizes."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.step_builder import fair_share
from rayloom_engine.core.step import SlotStep
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end


def _groups(scheduler, num: int) -> list[set[int]]:
    """The slots in the next `num` plans of a full pipeline."""
    rank, in_flight, groups = SimulatedRank(), deque(), []
    while len(groups) < num:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
            groups.append({step.slot for step in plan.slots})
        else:
            scheduler.update(rank.run(in_flight.popleft()))
    return groups


def test_a_sequence_waits_for_its_token_while_others_are_computed() -> None:
    scheduler, rank = make_scheduler(depth=2), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2), max_tokens=4))
    first = scheduler.schedule()
    assert scheduler.schedule() is None
    scheduler.add(make_sequence("b", prompt=(3, 4), max_tokens=4))
    second = scheduler.schedule()
    assert [[step.slot for step in plan.slots] for plan in (first, second)] == [[0], [1]]
    assert scheduler.schedule() is None
    scheduler.update(rank.run(first))
    third = scheduler.schedule()
    (token,) = expected_ids((1, 2), 1)
    assert third.slots == (SlotStep(slot=0, start=2, num_tokens=1, new_token_ids=(token,), samples=True),)


def test_the_next_chunk_of_a_prompt_does_not_wait_for_the_last_one() -> None:
    scheduler, rank = make_scheduler(depth=3), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(19), max_tokens=2))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [(step.start, step.num_tokens, step.samples) for plan in plans for step in plan.slots] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]
    outputs = [output for plan in plans for output in scheduler.update(rank.run(plan))]
    assert ids_of(outputs, "a") == expected_ids(range(19), 1)


def test_a_fork_joins_while_the_prompt_of_its_leader_is_in_flight() -> None:
    scheduler, rank = make_scheduler(depth=2), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(6), max_tokens=2))
    scheduler.add(make_sequence("b", prompt=range(6), max_tokens=2, fork_of="a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (len(first.slots), second.block_copies) == (1, ((1, 2),))
    outputs = scheduler.update(rank.run(first)) + scheduler.update(rank.run(second))
    outputs += run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == ids_of(outputs, "b") == expected_ids(range(6), 2)


def test_a_fork_that_joins_before_the_last_token_of_the_prompt_is_scheduled_copies_nothing() -> None:
    scheduler, rank = make_scheduler(depth=2, max_num_batched_tokens=4), SimulatedRank()
    for request_id, prompt, leader in (("older", (9,), None), ("a", range(5), None), ("b", range(5), "a")):
        scheduler.add(make_sequence(request_id, prompt, max_tokens=2, fork_of=leader))
    assert ids_of(run_to_end(scheduler, rank), "b") == expected_ids(range(5), 2)


def test_an_abort_in_flight_gives_slot_and_blocks_to_the_next_and_drops_the_late_token() -> None:
    scheduler, rank = make_scheduler(depth=2, max_num_seqs=1), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2, 3)))
    scheduler.add(make_sequence("b", prompt=(7, 8, 9), max_tokens=2))
    first = scheduler.schedule()
    assert scheduler.abort("a")
    scheduler.check_integrity()
    second = scheduler.schedule()
    assert (second.freed_slots, second.new_slots[0].slot) == ((0,), 0)
    assert second.new_slots[0].block_table == first.new_slots[0].block_table
    assert scheduler.update(rank.run(first)) == []
    outputs = scheduler.update(rank.run(second)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "b") == expected_ids((7, 8, 9), 2)


def test_a_sequence_in_flight_is_not_preempted_and_the_older_one_waits_for_it() -> None:
    scheduler, rank = make_scheduler(num_blocks=3, depth=2), SimulatedRank()
    scheduler.add(make_sequence("old", prompt=(1, 2, 3), max_tokens=4))
    scheduler.add(make_sequence("new", prompt=(4, 5, 6, 7), max_tokens=4))
    scheduler.update(rank.run(scheduler.schedule()))  # each sequence holds a block
    first, second = scheduler.schedule(), scheduler.schedule()  # "new" gets the third block
    scheduler.update(rank.run(first))
    assert scheduler.schedule() is None, "the old one needs a block, and only the new one has it"
    assert scheduler.counters.num_preemptions == 0
    scheduler.update(rank.run(second))
    third = scheduler.schedule()
    assert (scheduler.counters.num_preemptions, [step.slot for step in third.slots]) == (1, [0])


def test_plans_lost_with_the_ranks_are_computed_again_and_no_token_twice() -> None:
    scheduler, rank = make_scheduler(depth=3), SimulatedRank()
    for request_id, prompt in (("a", (1, 2)), ("b", (3, 4)), ("c", range(12))):
        scheduler.add(make_sequence(request_id, prompt, max_tokens=3))
    plans = [plan for _ in range(3) if (plan := scheduler.schedule()) is not None]
    outputs = scheduler.update(rank.run(plans[0]))
    scheduler.forget_ranks()
    rank.forget_all()
    scheduler.check_integrity()
    outputs += run_to_end(scheduler, rank)
    assert [ids_of(outputs, name) for name in "abc"] == [
        expected_ids(prompt, 3) for prompt in ((1, 2), (3, 4), range(12))
    ]


def test_groups_stay_equal_while_sequences_end() -> None:
    scheduler = make_scheduler(200, depth=2, max_num_seqs=16, max_num_batched_tokens=64)
    for index in range(16):
        scheduler.add(make_sequence(f"{index}", prompt=(1, index), max_tokens=3 if index < 6 else 20))
    # All prompts fit into one plan, which then splits into two groups of 8. Six sequences of the first group end, so
    # the groups have 2 and 8. When the result of the larger group arrives, both groups get 5 sequences.
    assert [len(group) for group in _groups(scheduler, 10)] == [16, 8, 8, 8, 8, 2, 5, 5, 5, 5]


@settings(deadline=None)
@given(depth=st.integers(1, 4), lengths=st.lists(st.one_of(st.integers(1, 6), st.just(200)), max_size=39))
def test_groups_become_equal_whoever_ends_first(depth: int, lengths: list[int]) -> None:
    scheduler = make_scheduler(1000, depth=depth, max_num_seqs=40, max_num_batched_tokens=512)
    lengths = [*lengths, 200]
    for index, num in enumerate(lengths):
        scheduler.add(make_sequence(f"{index}", prompt=(1, index), max_tokens=num))
    num_left = lengths.count(200)
    groups = _groups(scheduler, 20 * depth)
    turn: list[set[int]] = []  # the last plans, as long as no sequence is in two of them
    while not any(group & groups[-1] for group in turn):
        turn.append(groups.pop())
    assert len(set().union(*turn)) == scheduler.num_running == num_left, "everybody has a turn"
    assert len(turn) <= depth
    assert max(len(group) for group in turn) == -(-num_left // depth)


@pytest.mark.parametrize(
    ("num_tokens", "depth", "max_tokens", "share"),
    [
        (600, 2, 512, 300),
        (601, 2, 512, 301),
        (5000, 2, 512, 512),
        (100, 2, 512, 64),  # parts of fewer than 64 tokens are not worth a cut
        (100, 2, 32, 32),
    ],
)
def test_plans_share_the_tokens_that_are_to_be_computed(num_tokens, depth, max_tokens, share) -> None:
    assert fair_share(num_tokens, depth, max_tokens) == share


def test_a_long_prompt_is_cut_into_equal_parts_for_the_stages() -> None:
    scheduler = make_scheduler(200, depth=2, max_num_batched_tokens=512)
    scheduler.add(make_sequence("a", prompt=range(300), max_tokens=1))
    assert [scheduler.schedule().num_tokens for _ in range(2)] == [150, 150]
