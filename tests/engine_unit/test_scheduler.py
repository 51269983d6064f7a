"""Scheduling decisions with exact plans: blocks of 4 tokens, a budget of 8, at most 4 sequences, 11 blocks.

Invariants over random histories are in test_scheduler_properties.py; the ranks' computation of a plan is in
test_runner.py.
"""

from __future__ import annotations

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import PromptLogprobs, SlotStep, StepResult, TokenLogprobs
from rayloom_engine.errors import QueueFull, RequestError
from rt_scheduler import BLOCK_SIZE, SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end


def _advance(scheduler, rank, num=1):
    """Runs `num` steps and returns the plans."""
    plans = []
    for _ in range(num):
        plan = scheduler.schedule()
        scheduler.check_integrity()
        scheduler.update(rank.run(plan))
        scheduler.check_integrity()
        plans.append(plan)
    return plans


def test_a_short_prompt_is_computed_whole_and_then_grows_by_one() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2, 3), max_tokens=3))
    first, second, third = _advance(scheduler, rank, 3)
    assert first.new_slots[0].block_table == (0,)
    assert first.slots == (SlotStep(slot=0, start=0, num_tokens=3, samples=True),)
    one, two = expected_ids((1, 2, 3), 2)
    assert second.slots == (SlotStep(slot=0, start=3, num_tokens=1, new_token_ids=(one,), samples=True),)
    assert third.slots == (
        SlotStep(slot=0, start=4, num_tokens=1, new_token_ids=(two,), new_block_ids=(1,), samples=True),
    )
    assert scheduler.schedule() is None
    assert scheduler.pool.num_free == 11


def test_a_sampled_id_crosses_once_and_in_full_after_a_loss() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2, 3), max_tokens=6))
    one, two, three = expected_ids((1, 2, 3), 3)
    plans = _advance(scheduler, rank, 3)
    assert [plan.slots[0].new_token_ids for plan in plans] == [(), (one,), (two,)]
    scheduler.forget_ranks()
    rank.forget_all()
    resumed, after = _advance(scheduler, rank, 2)
    assert resumed.new_slots[0].token_ids == (1, 2, 3, one, two, three)
    assert (resumed.slots[0].new_token_ids, after.slots[0].new_token_ids) == ((), tuple(expected_ids((1, 2, 3), 4)[3:]))


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(19), max_tokens=1))
    plans = _advance(scheduler, rank, 3)
    assert [(p.slots[0].start, p.slots[0].num_tokens, p.slots[0].samples) for p in plans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_a_prefill() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2), max_tokens=5))
    _advance(scheduler, rank)
    scheduler.add(make_sequence("b", prompt=range(10, 20), max_tokens=2))
    (plan,) = _advance(scheduler, rank)
    assert [(s.start, s.num_tokens) for s in plan.slots] == [(2, 1), (0, 7)]


def test_the_second_request_finds_the_first_ones_full_blocks() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(9), max_tokens=1))
    run_to_end(scheduler, rank)
    computed = rank.num_computed_tokens
    scheduler.add(make_sequence("b", prompt=range(9), max_tokens=1))
    outputs = run_to_end(scheduler, rank)
    assert rank.num_computed_tokens - computed == 1  # 8 of 9 tokens are in full blocks
    assert outputs[0].num_cached_tokens == 8
    assert ids_of(outputs, "b") == expected_ids(range(9), 1)


def test_the_last_token_is_computed_even_when_every_block_is_known() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(8), max_tokens=1))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("b", prompt=range(8), max_tokens=1))
    assert run_to_end(scheduler, rank)[0].num_cached_tokens == 4


def test_no_prefix_is_reused_when_caching_is_off() -> None:
    scheduler, rank = make_scheduler(enable_prefix_caching=False), SimulatedRank()
    for request_id in ("a", "b"):
        scheduler.add(make_sequence(request_id, prompt=range(9), max_tokens=1))
        assert run_to_end(scheduler, rank)[0].num_cached_tokens == 0


def test_forks_share_full_blocks_and_copy_the_one_they_write() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(6), max_tokens=2))
    for fork in ("b", "c"):
        scheduler.add(make_sequence(fork, prompt=range(6), max_tokens=2, fork_of="a"))
    first, second = _advance(scheduler, rank, 2)
    assert len(first.slots) == 1  # the forks wait for the prompt
    assert [(s.start, s.num_tokens) for s in second.slots] == [(6, 1), (5, 1), (5, 1)]
    assert [(new.prompt_of, new.token_ids, new.num_shared_blocks) for new in second.new_slots] == [(0, (), 1)] * 2
    assert [new.block_table for new in second.new_slots] == [(2,), (3,)]  # after block 0 of the first sequence
    assert second.block_copies == ((1, 2), (1, 3))
    outputs = run_to_end(scheduler, rank)
    assert ids_of(outputs, "b") == expected_ids(range(6), 2)[1:]
    assert scheduler.pool.num_free == 11


def test_a_fork_without_its_leader_runs_alone() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("b", prompt=range(6), max_tokens=2, fork_of="gone"))
    assert ids_of(run_to_end(scheduler, rank), "b") == expected_ids(range(6), 2)


def test_a_fork_with_another_prompt_than_its_leader_shares_nothing() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2, 3), max_tokens=2))
    scheduler.add(make_sequence("b", prompt=(4, 5, 6), max_tokens=2, fork_of="a"))
    outputs = run_to_end(scheduler, rank)
    assert ids_of(outputs, "b") == expected_ids((4, 5, 6), 2)


def test_the_newest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    scheduler, rank = make_scheduler(num_blocks=4), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1, 2, 3), max_tokens=10))
    scheduler.add(make_sequence("b", prompt=(4, 5, 6), max_tokens=10))
    outputs = run_to_end(scheduler, rank)
    assert scheduler.counters.num_preemptions == 1
    assert ids_of(outputs, "a") == expected_ids((1, 2, 3), 10)
    assert ids_of(outputs, "b") == expected_ids((4, 5, 6), 10)
    finished = [output.sequence_id for output in outputs if output.finish_reason]
    assert finished == ["a", "b"]
    preempted = {(output.sequence_id, output.num_preemptions) for output in outputs}
    assert preempted == {("a", 0), ("b", 0), ("b", 1)}
    assert [output.num_preemptions for output in outputs if output.sequence_id == "b"][-1] == 1


def test_lower_priority_numbers_run_first_and_are_preempted_last() -> None:
    scheduler, rank = make_scheduler(num_blocks=4, max_num_seqs=2), SimulatedRank()
    scheduler.add(make_sequence("later", prompt=(1, 2, 3), max_tokens=10, priority=1))
    scheduler.add(make_sequence("first", prompt=(4, 5, 6), max_tokens=10, priority=0))
    outputs = run_to_end(scheduler, rank)
    assert [output.sequence_id for output in outputs if output.finish_reason] == ["first", "later"]
    assert scheduler.counters.num_preemptions == 1


def test_a_request_ends_at_eos_a_stop_id_its_limit_or_the_context() -> None:
    prompt = (1, 2, 3)
    following = expected_ids(prompt, 8)
    cases = [
        (make_sequence("eos", prompt, 8, eos_token_ids=(following[2],)), "stop", 3),
        (
            make_sequence("id", prompt, params=DecodingParams(max_tokens=8, stop_token_ids=(following[1],))),
            "stop",
            2,
        ),
        (make_sequence("limit", prompt, 5), "length", 5),
        (make_sequence("context", prompt, 100), "length", 8 - 3),
    ]
    for sequence, reason, num in cases:
        scheduler = make_scheduler(max_model_len=8)
        scheduler.add(sequence)
        outputs = run_to_end(scheduler, SimulatedRank())
        assert ids_of(outputs, sequence.request_id) == following[:num]
        assert outputs[-1].finish_reason == reason
        assert outputs[-1].stop_token_id == (following[num - 1] if reason == "stop" else None)


def test_eos_is_ignored_when_requested() -> None:
    following = expected_ids((1, 2, 3), 4)
    params = DecodingParams(max_tokens=4, ignore_eos=True)
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", (1, 2, 3), params=params, eos_token_ids=(following[0],)))
    assert ids_of(run_to_end(scheduler, SimulatedRank()), "a") == following


def test_a_resumed_request_continues_after_its_last_token() -> None:
    following = expected_ids((1, 2, 3), 6)
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", (1, 2, 3), max_tokens=6, generated_ids=following[:4]), is_resume=True)
    assert ids_of(run_to_end(scheduler, SimulatedRank()), "a") == following[4:]


def test_abort_gives_blocks_and_slot_back_at_once() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", max_tokens=40))
    scheduler.add(make_sequence("b", prompt=(9, 9), max_tokens=2))
    _advance(scheduler, rank)
    assert scheduler.abort("a")
    scheduler.check_integrity()
    assert not scheduler.abort("a")
    (plan,) = _advance(scheduler, rank)
    assert plan.freed_slots == (0,)
    assert scheduler.pool.num_free == 11


def test_a_full_queue_refuses_new_requests_but_not_resumed_ones() -> None:
    scheduler = make_scheduler(max_queued=1, max_num_seqs=1)
    scheduler.add(make_sequence("a"))
    scheduler.add(make_sequence("b"))  # the next step has room for one of the two, so only one counts as queued
    with pytest.raises(QueueFull, match="2 sequences wait already, at most 2 may"):
        scheduler.add(make_sequence("c"))
    scheduler.add(make_sequence("d"), is_resume=True)
    assert scheduler.num_waiting == 3


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [((), "the prompt is empty"), (range(44), "44 tokens leave no room to generate; at most 43")],
)
def test_a_request_that_can_never_run_is_refused(prompt, sentence) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=sentence):
        scheduler.add(make_sequence("a", prompt=prompt))
    assert not scheduler.has_unfinished


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    with pytest.raises(RequestError, match="the id 'a' is in use"):
        scheduler.add(make_sequence("a"))


def test_prompt_logprobs_are_gathered_over_chunks_and_come_with_the_first_token() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    params = DecodingParams(max_tokens=2, prompt_logprobs=0)
    scheduler.add(make_sequence("a", prompt=range(10), params=params))
    seen = []
    while (plan := scheduler.schedule()) is not None:
        (step,) = plan.slots
        last = min(step.start + step.num_tokens, 9)
        entries = tuple(TokenLogprobs(p + 1, -1.0, 1) for p in range(step.start, last))
        parts = (PromptLogprobs(step.slot, step.start + 1, entries),) if entries else ()
        result = rank.run(plan)
        result = StepResult(step_id=result.step_id, epoch=result.epoch, sampled=result.sampled, prompt_logprobs=parts)
        seen += [[entry.token_id for entry in output.prompt_logprobs] for output in scheduler.update(result)]
    assert seen == [list(range(1, 10)), []]


def test_a_plan_is_refused_after_another_epoch() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    plan = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.update(StepResult(step_id=plan.step_id, epoch=plan.epoch + 1))


def test_only_those_allowed_are_scheduled_and_the_others_make_room_and_lose_no_token() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)  # room for two at a time
    rank = SimulatedRank()
    for name in ("a", "b", "c"):
        scheduler.add(make_sequence(name, range(7), max_tokens=6))
    outputs = []

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        seen.append({sequence.request_id for sequence in scheduler.in_flight()})
        outputs.extend(scheduler.update(rank.run(plan)))
        scheduler.check_integrity()

    seen: list[set[str]] = []
    step()
    for only in ("c", "b", "a"):
        scheduler.restrict(frozenset({only}))
        step()
        assert seen[-1] == {only}
        assert scheduler.in_flight() == {}
    scheduler.restrict(None)
    outputs += run_to_end(scheduler, rank)
    assert all(ids_of(outputs, name) == expected_ids(range(7), 6) for name in ("a", "b", "c"))


def test_only_a_step_that_fills_a_block_registers_one() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=range(7), max_tokens=10))
    registered = []
    register = scheduler.pool.register

    def count(block_id: int, content: bytes) -> None:
        registered.append(block_id)
        register(block_id, content)

    scheduler.pool.register = count
    [sequence] = scheduler.unfinished()
    steps = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        steps.append(list(registered))
        registered.clear()
        scheduler.update(rank.run(plan))
    # The prompt's 7 tokens fill block 0. Positions 7, 11 and 15 end the next blocks, in the 1st, 5th and 9th decode.
    assert steps == [[0], [1], [], [], [], [2], [], [], [], [3]]
    assert sequence.hashes(4, BLOCK_SIZE, 3) == sequence.hashes(4, BLOCK_SIZE)[3:]
