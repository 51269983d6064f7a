"""Several tenants: admission, preemption and places in the queue; blocks of 4 tokens, a budget of 8, 4 slots.

Tenant "x" sends without end, "y" is the other tenant.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.waiting_queue import WaitingQueue, has_room
from rayloom_engine.errors import QueueFull
from rt_scheduler import SimulatedRank, expected_ids, finish_order, ids_of, make_scheduler, make_sequence, run_to_end


def _step(scheduler, rank):
    """Runs one step. Returns the ids of the sequences in the plan, and the outputs."""
    plan = scheduler.schedule()
    names = [sequence.request_id for sequence in scheduler.in_flight()]
    outputs = scheduler.update(rank.run(plan))
    scheduler.check_integrity()
    return names, outputs


def _flood(scheduler, num: int, tenant: str = "x", num_prompt: int = 2, **other) -> None:
    for number in range(num):
        prompt = [(number + position) % 50 for position in range(num_prompt)]
        scheduler.add(make_sequence(f"{tenant}{number}", prompt=prompt, tenant=tenant, **other))


def test_a_waiting_sequence_takes_the_place_of_one_of_a_higher_rank() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    _flood(scheduler, 6, max_tokens=9)
    assert _step(scheduler, rank)[0] == ["x0", "x1", "x2", "x3"]
    for name in ("y0", "y1", "y2"):
        scheduler.add(make_sequence(name, prompt=[ord(name[1])], tenant="y", max_tokens=9))
    # Each tenant has two sequences now. With y2, y would have three and x one.
    assert _step(scheduler, rank)[0] == ["y0", "y1", "x0", "x1"]
    assert scheduler.counters.num_preemptions == 2
    assert _step(scheduler, rank)[0] == ["x0", "y0", "x1", "y1"], "and nothing is made back"
    outputs = run_to_end(scheduler, rank)
    assert scheduler.counters.num_preemptions == 2
    assert finish_order(outputs)[:4] == ["x0", "x1", "y0", "y1"]


def test_a_preempted_sequence_ends_with_the_tokens_that_it_would_get_alone() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    _flood(scheduler, 4, max_tokens=9)
    outputs = _step(scheduler, rank)[1]
    _flood(scheduler, 4, tenant="y", max_tokens=3)
    outputs += run_to_end(scheduler, rank)
    assert all(ids_of(outputs, f"x{n}") == expected_ids([n, n + 1], 9) for n in range(4))


def test_a_tenant_with_one_sequence_keeps_it() -> None:
    scheduler, rank = make_scheduler(max_num_seqs=1), SimulatedRank()
    _flood(scheduler, 2, max_tokens=3)
    _step(scheduler, rank)
    scheduler.add(make_sequence("y0", prompt=(7,), tenant="y", max_tokens=1))
    assert finish_order(run_to_end(scheduler, rank)) == ["x0", "y0", "x1"], "then it is the other's turn"


def test_the_tenant_whose_last_admission_is_longer_ago_comes_first() -> None:
    scheduler, rank = make_scheduler(max_num_seqs=1), SimulatedRank()
    _flood(scheduler, 3, tenant="x", max_tokens=1)
    _flood(scheduler, 2, tenant="y", max_tokens=1)
    _flood(scheduler, 2, tenant="z", max_tokens=1)
    assert finish_order(run_to_end(scheduler, rank)) == ["x0", "y0", "z0", "x1", "y1", "z1", "x2"]


def test_a_tenant_that_returns_does_not_overtake_one_that_waits() -> None:
    """y and z each have only one request at a time and return at once. Still x gets its turns."""
    scheduler, rank = make_scheduler(max_num_seqs=1), SimulatedRank()
    _flood(scheduler, 3, max_tokens=1)
    order = []
    for number in range(6):
        for tenant in "yz":
            if not any(s.tenant == tenant for s in scheduler.unfinished()):
                name = f"{tenant}{number}"
                scheduler.add(make_sequence(name, prompt=(number,), tenant=tenant, max_tokens=1))
        order += finish_order(_step(scheduler, rank)[1])
    assert order == ["x0", "y0", "z0", "x1", "y2", "z3"]


def test_blocks_are_taken_from_the_tenant_with_more_sequences() -> None:
    """x holds ten of eleven blocks, and y needs two."""
    scheduler, rank = make_scheduler(max_num_batched_tokens=64), SimulatedRank()
    _flood(scheduler, 2, num_prompt=16, max_tokens=9)
    _step(scheduler, rank)
    _step(scheduler, rank)
    assert scheduler.pool.num_free == 1
    scheduler.add(make_sequence("y0", prompt=range(8), tenant="y", max_tokens=1))
    assert _step(scheduler, rank)[0] == ["y0", "x0"]
    assert scheduler.counters.num_preemptions == 1


def test_nobody_is_preempted_where_that_would_not_make_enough_room() -> None:
    scheduler, rank = make_scheduler(max_num_batched_tokens=64), SimulatedRank()
    _flood(scheduler, 1, num_prompt=24, max_tokens=9)
    scheduler.add(make_sequence("x1", prompt=(49, 48), tenant="x", max_tokens=9))
    _step(scheduler, rank)
    scheduler.add(make_sequence("y0", prompt=[9] * 24, tenant="y", max_tokens=1))
    assert _step(scheduler, rank)[0] == ["x0", "x1"]
    assert scheduler.counters.num_preemptions == 0


def test_the_victim_for_blocks_is_the_newest_of_the_tenant_with_most_not_the_newest_of_all() -> None:
    scheduler, rank = make_scheduler(num_blocks=5, max_model_len=20), SimulatedRank()
    _flood(scheduler, 2, max_tokens=12)  # 14 tokens in 4 blocks each
    scheduler.add(make_sequence("y0", prompt=(9,), tenant="y", max_tokens=4))  # the newest sequence
    outputs = run_to_end(scheduler, rank)
    assert scheduler.counters.num_preemptions == 1
    assert finish_order(outputs) == ["y0", "x0", "x1"]


def test_a_step_shares_its_prompt_tokens_between_tenants() -> None:
    scheduler, rank = make_scheduler(20), SimulatedRank()
    _flood(scheduler, 1, num_prompt=30, max_tokens=1)
    _step(scheduler, rank)
    scheduler.add(make_sequence("y0", prompt=[9] * 6, tenant="y", max_tokens=1))
    plan = scheduler.schedule()
    assert [(s.start, s.num_tokens) for s in plan.slots] == [(8, 4), (0, 4)]
    scheduler.update(rank.run(plan))
    plan = scheduler.schedule()
    assert [(s.start, s.num_tokens) for s in plan.slots] == [(12, 6), (4, 2)], "what y leaves of its half is for x"


def test_priority_orders_the_requests_of_one_tenant_only() -> None:
    scheduler, rank = make_scheduler(max_num_seqs=1), SimulatedRank()
    scheduler.add(make_sequence("y0", prompt=(1,), tenant="y", max_tokens=1, priority=5))
    scheduler.add(make_sequence("x0", prompt=(2,), tenant="x", max_tokens=1, priority=0))
    scheduler.add(make_sequence("x1", prompt=(3,), tenant="x", max_tokens=1, priority=-9))
    assert finish_order(run_to_end(scheduler, rank)) == ["y0", "x1", "x0"]


def test_cached_blocks_are_found_by_the_same_cache_key_alone() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    cached = []
    for number, key in enumerate((b"salt1", b"salt1", b"salt2", b"")):
        scheduler.add(make_sequence(f"{number}", prompt=range(9), cache_key=key, max_tokens=1))
        cached += [output.num_cached_tokens for output in run_to_end(scheduler, rank)]
    assert cached == [0, 8, 0, 0]


def test_a_fork_of_another_tenant_shares_nothing() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(9), tenant="x", cache_key=b"x", max_tokens=3))
    _step(scheduler, rank)
    _step(scheduler, rank)
    scheduler.add(make_sequence("b", prompt=range(9), tenant="y", cache_key=b"y", fork_of="a", max_tokens=1))
    assert [output.num_cached_tokens for output in run_to_end(scheduler, rank) if output.sequence_id == "b"] == [0]


def test_one_tenant_fills_half_of_the_queue_and_the_next_half_of_the_rest() -> None:
    scheduler, rank = make_scheduler(100, max_queued=8, max_num_seqs=2), SimulatedRank()
    _flood(scheduler, 2, max_tokens=50)
    _step(scheduler, rank)
    for tenant, num in (("x", 4), ("y", 2), ("z", 1)):
        for number in range(num):
            scheduler.add(make_sequence(f"{tenant}q{number}", tenant=tenant))
        with pytest.raises(QueueFull, match=f"{num} sequences of this API key wait already"):
            scheduler.add(make_sequence(f"{tenant}more", tenant=tenant))
    scheduler.add(make_sequence("w", tenant="w"))
    with pytest.raises(QueueFull, match="8 sequences wait already, at most 8 may"):
        scheduler.add(make_sequence("v", tenant="v"))
    scheduler.add(make_sequence("resumed", tenant="x"), is_resume=True)


def test_without_keys_the_queue_is_not_shared() -> None:
    scheduler = make_scheduler(max_queued=8, max_num_seqs=2)
    for number in range(10):
        scheduler.add(make_sequence(f"{number}"))
    with pytest.raises(QueueFull, match="10 sequences wait already, at most 10 may"):
        scheduler.add(make_sequence("more"))


@settings(deadline=None)
@given(
    max_queued=st.integers(1, 70),
    moves=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=200),
)
def test_floods_leave_a_place_for_a_tenant_that_comes_new(max_queued, moves) -> None:
    """Tenants 0 to 4 submit or cancel requests. Any k of them leave max_queued / 2**k places, whatever they do."""
    waiting = [0] * 5
    flooding = set()
    for tenant, sends in moves:
        if sends and has_room(waiting[tenant], sum(waiting), 0, max_queued):
            waiting[tenant] += 1
            flooding.add(tenant)
        elif not sends and waiting[tenant]:
            waiting[tenant] -= 1
        assert sum(waiting) <= max_queued
        if max_queued >= 2 ** len(flooding):
            assert has_room(0, sum(waiting), 0, max_queued)
            assert max_queued - sum(waiting) >= max_queued // 2 ** len(flooding)


@settings(deadline=None)
@given(
    arrivals=st.lists(st.sampled_from("xyz"), max_size=30),
    num_running=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 5)),
)
def test_the_queue_is_read_by_rank_and_whole(arrivals, num_running) -> None:
    queue = WaitingQueue()
    for number, tenant in enumerate(arrivals):
        sequence = make_sequence(f"{number}", tenant=tenant)
        sequence.number = number
        queue.add(sequence)
    read = list(queue.in_turns(num_running))
    assert len(read) == len(queue) == len(arrivals)
    assert [rank for rank, _ in read] == sorted(rank for rank, _ in read)
    for tenant in "xyz":
        ranks = [rank for rank, sequence in read if sequence.tenant == tenant]
        first = num_running.get(tenant, 0)
        assert ranks == list(range(first, first + arrivals.count(tenant)))


@settings(deadline=None, print_blob=True)
@given(
    num_flood=st.integers(1, 30),
    num_prompt=st.integers(1, 12),
    num_running=st.integers(0, 10),
    max_num_seqs=st.integers(2, 6),
    budget=st.integers(2, 12),
    num_blocks=st.integers(20, 40),
)
def test_a_light_tenant_computes_in_the_step_after_its_request(
    num_flood, num_prompt, num_running, max_num_seqs, budget, num_blocks
) -> None:
    """If at least two sequences of x run, the next step computes y's request.

    The number of x's waiting requests does not matter.
    """
    scheduler = make_scheduler(
        num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=40, max_queued=100
    )
    rank = SimulatedRank()
    _flood(scheduler, num_flood, num_prompt=num_prompt, max_tokens=20)
    for _ in range(num_running):
        if scheduler.has_unfinished:
            _step(scheduler, rank)
    is_due = scheduler.num_running >= 2
    scheduler.add(make_sequence("y0", prompt=(49,), tenant="y", max_tokens=1))
    steps = 0
    while any(sequence.request_id == "y0" for sequence in scheduler.unfinished()):
        _step(scheduler, rank)
        steps += 1
    assert steps == 1 or not is_due
    run_to_end(scheduler, rank)


def test_the_last_admissions_of_a_bounded_number_of_tenants_are_remembered() -> None:
    queue = WaitingQueue()
    for number in range(3000):
        sequence = make_sequence(f"{number}", tenant=f"key {number}")
        queue.add(sequence)
        queue.admit(sequence)
    assert sorted(queue._admissions.values()) == list(range(3000 - 1024 + 1, 3001))
