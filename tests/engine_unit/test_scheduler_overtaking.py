"""Overtaking in the waiting queue, and turns if the budget is smaller than the number of decodes.

Blocks of 4 tokens. All sequences are of one tenant; test_scheduler_tenants.py has several.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.overtaking import Line
from rt_scheduler import SimulatedRank, expected_ids, finish_order, ids_of, make_scheduler, make_sequence, run_to_end


def _slots_of_steps(scheduler, rank, num: int) -> list[list[int]]:
    """Runs the next `num` plans and applies their results. Returns the slots in each plan."""
    slots = []
    for _ in range(num):
        plan = scheduler.schedule()
        slots.append([step.slot for step in plan.slots])
        scheduler.update(rank.run(plan))
        scheduler.check_integrity()
    return slots


def test_a_long_prompt_that_waits_for_room_does_not_hold_up_short_ones() -> None:
    scheduler, rank = make_scheduler(20, max_num_batched_tokens=64, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("runs", prompt=[3] * 30, max_tokens=20))
    _slots_of_steps(scheduler, rank, 1)
    scheduler.add(make_sequence("long", prompt=range(50), max_tokens=2))
    for name in "wxyz":
        scheduler.add(make_sequence(name, prompt=[ord(name)] * 8, max_tokens=2))
    assert _slots_of_steps(scheduler, rank, 1) == [[0, 1, 2, 3, 4]], "all short ones at once"
    assert finish_order(run_to_end(scheduler, rank)) == ["w", "x", "y", "z", "runs", "long"]


def test_a_sequence_is_overtaken_by_as_many_tokens_as_it_has() -> None:
    """The long sequence has 13 tokens. Two overtakers of 8 tokens would have 16, so only one may overtake."""
    scheduler, rank = make_scheduler(9, max_num_batched_tokens=64, max_num_seqs=8), SimulatedRank()
    scheduler.add(make_sequence("runs", prompt=[3] * 20, max_tokens=12))
    _slots_of_steps(scheduler, rank, 1)
    scheduler.add(make_sequence("long", prompt=range(13), max_tokens=1))
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, prompt=[7] * 8, max_tokens=1))
    assert finish_order(run_to_end(scheduler, rank)) == ["first", "runs", "long", "second"]


def test_a_sequence_is_overtaken_by_max_num_seqs_others_at_most() -> None:
    scheduler, rank = make_scheduler(9, max_num_batched_tokens=64, max_num_seqs=3), SimulatedRank()
    scheduler.add(make_sequence("runs", prompt=[3] * 20, max_tokens=12))
    _slots_of_steps(scheduler, rank, 1)
    scheduler.add(make_sequence("long", prompt=range(16), max_tokens=1))
    for number in range(4):
        scheduler.add(make_sequence(f"{number}", prompt=[number], max_tokens=1))
    assert finish_order(run_to_end(scheduler, rank)) == ["0", "1", "2", "runs", "long", "3"]


def test_a_sequence_that_may_not_overtake_is_overtaken_within_its_own_bound() -> None:
    line = Line(max_overtakers=2)
    long, middle, short = (make_sequence(name, prompt=range(num)) for name, num in (("l", 10), ("m", 8), ("s", 2)))
    line.hold(long)
    assert line.may_pass(middle)
    line.hold(middle)
    for _ in range(2):
        assert line.may_pass(short) and not line.is_closed
        line.passed(short)
    assert line.is_closed
    assert (long.num_overtaking_tokens, middle.num_overtakers) == (4, 2)


@settings(deadline=None, print_blob=True)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 30)), min_size=1, max_size=25),
    num_blocks=st.integers(10, 16),
    max_num_seqs=st.integers(1, 5),
)
def test_nobody_is_overtaken_beyond_the_bound(arrivals, num_blocks, max_num_seqs) -> None:
    """Arrivals are (prompt, tokens, step of arrival). The test counts overtakers only from the plans.

    A preempted sequence stays older than later arrivals. So it overtakes none of them when it waits in front of them.
    """
    scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=40)
    rank = SimulatedRank()
    waiting = {}  # in order of arrival: name -> [tokens, overtakers, their tokens]
    admitted = set()
    step = 0
    while scheduler.has_unfinished or step <= 30:
        for number, (num_prompt, num_tokens, at_step) in enumerate(arrivals):
            if at_step == step:
                scheduler.add(make_sequence(f"{number}", prompt=[number] * num_prompt, max_tokens=num_tokens))
                waiting[f"{number}"] = [num_prompt, 0, 0]
        plan = scheduler.schedule()
        for new in plan.new_slots if plan is not None else ():
            if new.request_id in admitted:
                continue  # the sequence was preempted
            admitted.add(new.request_id)
            num_prompt, _, _ = waiting.pop(new.request_id)
            for other, counts in waiting.items():
                if int(other) in _before(new.request_id, arrivals):
                    counts[1] += 1
                    counts[2] += num_prompt
                    assert counts[1] <= max_num_seqs
                    assert counts[2] <= counts[0]
        if plan is not None:
            scheduler.update(rank.run(plan))
            scheduler.check_integrity()
        step += 1
        assert step < 3000, "starved"


def _before(name: str, arrivals: list[tuple[int, int, int]]) -> set[int]:
    """The sequences that arrived before the sequence `name`."""
    own = (arrivals[int(name)][2], int(name))
    return {number for number, (_, _, at_step) in enumerate(arrivals) if (at_step, number) < own}


def test_a_budget_below_the_running_decodes_goes_round() -> None:
    scheduler, rank = make_scheduler(100, max_num_batched_tokens=4, max_num_seqs=8), SimulatedRank()
    for number in range(6):
        scheduler.add(make_sequence(f"{number}", prompt=[number], max_tokens=40))
    assert _slots_of_steps(scheduler, rank, 6) == [
        [0, 1, 2, 3],  # the prompts of four sequences use the whole budget
        [4, 0, 1, 2],  # a fifth is admitted, although four decodes could use the whole budget
        [5, 3, 4, 0],
        [1, 2, 5, 3],
        [4, 0, 1, 2],
        [5, 3, 4, 0],
    ]


def test_prefills_alternate_with_decodes_that_fill_the_budget() -> None:
    scheduler, rank = make_scheduler(100, max_num_batched_tokens=1, max_num_seqs=2), SimulatedRank()
    scheduler.add(make_sequence("a", prompt=(1,), max_tokens=40))
    scheduler.add(make_sequence("long", prompt=range(9), max_tokens=2))
    assert _slots_of_steps(scheduler, rank, 6) == [[0], [1], [0], [1], [0], [1]]


@settings(deadline=None, print_blob=True)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    budget=st.integers(1, 12),
    depth=st.integers(1, 2),
)
@example(prompts=[1, 1, 1, 12, 12, 1, 1, 8, 9, 3], budget=5, depth=1)  # four decodes leave one token to two prefills
def test_every_running_sequence_computes_within_as_many_steps_as_there_are(prompts, budget, depth) -> None:
    """If blocks suffice, a sequence waits for at most one step of every other sequence and for `depth` steps in flight.

    A prompt waits longer only while an older prompt is computed. Prefills share the budget that decodes leave, and the
    oldest prefill comes first.
    """
    scheduler = make_scheduler(200, max_num_batched_tokens=budget, max_num_seqs=10, depth=depth)
    for number, num_prompt in enumerate(prompts):
        scheduler.add(make_sequence(f"{number}", prompt=[number] * num_prompt, max_tokens=20))
    rank = SimulatedRank()
    in_flight = []
    waited: dict[str, int] = {}  # running request -> steps since its last step; steps for older prompts do not count
    outputs = []
    while scheduler.has_unfinished:
        prefills = {s.slot: int(s.request_id) for s in scheduler.running() if s.num_tokens - s.num_computed > 1}
        plan = scheduler.schedule()
        if plan is None:
            outputs += scheduler.update(rank.run(in_flight.pop(0)))
            continue
        in_flight.append(plan)
        computed = {slot.slot for slot in plan.slots}
        oldest = min((number for slot, number in prefills.items() if slot in computed), default=len(prompts))
        running = list(scheduler.running())
        waited = {s.request_id: waited.get(s.request_id, 0) for s in running}
        for sequence in running:
            if sequence.slot in computed:
                waited[sequence.request_id] = 0
            elif sequence.slot not in prefills or int(sequence.request_id) < oldest:
                waited[sequence.request_id] += 1
        assert max(waited.values(), default=0) <= len(prompts) + depth
    for number, num_prompt in enumerate(prompts):
        assert ids_of(outputs, f"{number}") == expected_ids([number] * num_prompt, 20)
