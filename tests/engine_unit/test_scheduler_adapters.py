"""Adapter slots as a resource of the scheduler: waiting sequences, loads of adapters, and shared KV blocks."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.adapter import Adapter, AdapterLoad
from rayloom_engine.core.adapter_slots import AdapterSlots
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.sequence import BROKEN_ADAPTER, Sequence
from rayloom_engine.errors import RequestError
from rt_scheduler import SimulatedRank, expected_ids, finish_order, ids_of, make_scheduler, make_sequence, run_to_end

A, B, C = (Adapter(f"/{name}", name.encode() * 16) for name in "abc")
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def sequence_with(
    request_id: str,
    adapter: Adapter | None,
    max_tokens: int = 3,
    prompt: tuple[int, ...] = PROMPT,
    tenant: str = "",
) -> Sequence:
    params = DecodingParams(max_tokens=max_tokens, temperature=0.0, adapter=adapter)
    return make_sequence(request_id, prompt, params=params, tenant=tenant)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def test_an_adapter_is_loaded_once_and_its_slot_named() -> None:
    scheduler = make_scheduler(max_loras=2, max_num_batched_tokens=64, num_blocks=40)
    add(scheduler, sequence_with("1", A), sequence_with("2", B), sequence_with("3", A), sequence_with("4", None))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.adapter_loads == (AdapterLoad(0, A), AdapterLoad(1, B))
    assert [(new.request_id, new.adapter_slot) for new in plan.new_slots] == [("1", 0), ("2", 1), ("3", 0), ("4", -1)]


def test_a_request_without_a_free_adapter_slot_waits_and_holds_up_no_other() -> None:
    scheduler = make_scheduler(max_loras=1, max_num_batched_tokens=64, num_blocks=40)
    add(scheduler, sequence_with("1", A), sequence_with("2", B), sequence_with("3", None), sequence_with("4", A))
    outputs = run_to_end(scheduler, SimulatedRank())
    assert finish_order(outputs) == ["1", "3", "4", "2"]


def test_requests_for_a_loaded_adapter_overtake_one_that_waits_for_a_slot_within_a_bound() -> None:
    scheduler = make_scheduler(max_loras=1, max_num_batched_tokens=64, num_blocks=80, max_num_seqs=2, max_model_len=40)
    rank = SimulatedRank()
    scheduler.add(sequence_with("first", A))
    scheduler.add(sequence_with("waits", B))
    order: list[str] = []
    for number in range(40):  # a request for A arrives before every step
        scheduler.add(sequence_with(f"a{number}", A))
        plan = scheduler.schedule()
        assert plan is not None
        order += finish_order(scheduler.update(rank.run(plan)))
        scheduler.check_integrity()
    overtakers = [name for name in order[: order.index("waits")] if name != "first"]
    assert len(overtakers) <= 2, "max_num_seqs"


def test_an_adapter_in_use_stays_and_the_one_unused_for_longest_goes() -> None:
    slots = AdapterSlots(2)
    assert (slots.use(A), slots.use(B)) == (0, 1)
    assert not slots.has_room(C)
    slots.leave(A)
    slots.leave(B)
    slots.use(A)
    assert slots.has_room(C)
    assert slots.use(C) == 1  # the slot of B, because A is in use
    assert slots.take_loads() == (AdapterLoad(0, A), AdapterLoad(1, C))
    assert not slots.has_room(B)


def test_equal_prompts_of_different_adapters_share_no_blocks() -> None:
    scheduler = make_scheduler(max_loras=3, max_num_batched_tokens=64, num_blocks=60)
    rank = SimulatedRank()
    for request_id, adapter in (("1", A), ("2", None), ("3", B), ("4", A), ("5", None)):
        scheduler.add(sequence_with(request_id, adapter))
        outputs = run_to_end(scheduler, rank)
        cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
        assert cached[:1] == [8 if request_id in "45" else 0]


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_alone_and_is_tried_again() -> None:
    scheduler = make_scheduler(max_loras=2, max_num_batched_tokens=64, num_blocks=40)
    rank = SimulatedRank()
    rank.broken_adapters = {B.digest}
    add(scheduler, sequence_with("1", A), sequence_with("2", B), sequence_with("3", B), sequence_with("4", None))
    outputs = run_to_end(scheduler, rank)
    ends = {output.sequence_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {"1": "length", "2": BROKEN_ADAPTER, "3": BROKEN_ADAPTER, "4": "length"}
    rank.broken_adapters = set()
    scheduler.add(sequence_with("5", B))
    assert ids_of(run_to_end(scheduler, rank), "5") == expected_ids(PROMPT, 3)


def test_an_engine_without_adapter_slots_refuses_an_adapter() -> None:
    with pytest.raises(RequestError, match="takes no adapters; start it with --lora or --allow-runtime"):
        make_scheduler().add(sequence_with("1", A))


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from((None, A, B, C)),
            st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
            st.integers(1, 6),
            st.integers(0, 10),
            st.sampled_from(("", "x", "y")),
        ),
        min_size=1,
        max_size=12,
    ),
    max_loras=st.integers(1, 3),
    max_num_seqs=st.integers(1, 4),
    depth=st.integers(1, 3),
    num_blocks=st.integers(9, 20),
    losses=st.sets(st.integers(0, 30), max_size=2),
)
def test_every_request_gets_its_tokens_from_its_own_adapter(
    arrivals: list[tuple[Adapter | None, tuple[int, ...], int, int, str]],
    max_loras: int,
    max_num_seqs: int,
    depth: int,
    num_blocks: int,
    losses: set[int],
) -> None:
    """The simulated rank refuses another request's adapter for a sequence, and KV that another adapter has computed."""
    scheduler = make_scheduler(num_blocks, max_loras=max_loras, max_num_seqs=max_num_seqs, depth=depth)
    rank = SimulatedRank()
    in_flight: deque = deque()
    outputs = []
    for step in range(2000):
        for number, (adapter, prompt, max_tokens, at_step, tenant) in enumerate(arrivals):
            if at_step == step:
                scheduler.add(sequence_with(str(number), adapter, max_tokens, prompt, tenant))
        if step in losses:
            in_flight.clear()
            scheduler.forget_ranks()
            rank.forget_all()
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        elif in_flight:
            outputs += scheduler.update(rank.run(in_flight.popleft()))
        else:
            assert not scheduler.has_unfinished, "work left, but nothing was scheduled"
        scheduler.check_integrity()
        if step > 30 and not scheduler.has_unfinished:
            break
    for number, (_, prompt, max_tokens, _, _) in enumerate(arrivals):
        assert ids_of(outputs, str(number)) == expected_ids(prompt, max_tokens)


def test_a_tenant_gets_half_of_the_adapter_slots_and_others_the_rest() -> None:
    slots = AdapterSlots(4)
    adapters = [Adapter(f"/{number}", bytes([number]) * 16) for number in range(6)]
    for number in range(2):
        assert slots.is_in_share(adapters[number], "x")
        slots.use(adapters[number], "x")
    assert not slots.is_in_share(adapters[2], "x"), "2 slots are unused, and x uses 2"
    assert slots.is_in_share(adapters[1], "x"), "it uses no further slot"
    assert slots.is_in_share(adapters[2], ""), "without API keys there is one tenant"
    assert slots.is_in_share(adapters[2], "y")
    slots.use(adapters[2], "y")
    assert not slots.is_in_share(adapters[3], "y"), "1 slot is unused, and y uses 1"
    assert slots.is_in_share(adapters[3], "z")
    slots.leave(adapters[0], "x")
    slots.leave(adapters[1], "x")
    assert slots.is_in_share(adapters[3], "x")
    slots.check_integrity([("y", adapters[2])])


def test_a_tenant_that_waits_for_its_share_holds_up_no_other_tenant() -> None:
    scheduler = make_scheduler(max_loras=2, max_num_batched_tokens=64, num_blocks=80, max_num_seqs=4)
    rank = SimulatedRank()
    add(scheduler, *(sequence_with(f"x{n}", each, 12, tenant="x") for n, each in enumerate((A, B, A, B))))
    plan = scheduler.schedule()
    assert plan is not None
    assert [new.request_id for new in plan.new_slots] == ["x0", "x2"], "x may use one of two slots"
    scheduler.add(sequence_with("y", C, tenant="y"))
    outputs = scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank)
    assert finish_order(outputs)[0] == "y"
    assert sorted(finish_order(outputs)) == ["x0", "x1", "x2", "x3", "y"]


def test_a_tenants_own_requests_overtake_one_that_waits_for_its_share_within_a_bound() -> None:
    scheduler = make_scheduler(max_loras=2, max_num_batched_tokens=64, num_blocks=80, max_num_seqs=2, max_model_len=40)
    rank = SimulatedRank()
    add(scheduler, sequence_with("first", A, tenant="x"), sequence_with("waits", B, tenant="x"))
    order: list[str] = []
    for number in range(40):  # a request for A arrives before every step
        scheduler.add(sequence_with(f"a{number}", A, tenant="x"))
        plan = scheduler.schedule()
        assert plan is not None
        order += finish_order(scheduler.update(rank.run(plan)))
        scheduler.check_integrity()
    overtakers = [name for name in order[: order.index("waits")] if name != "first"]
    assert len(overtakers) <= 2, "max_num_seqs"
