"""The costs of steps that an engine measures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.step import DraftWork, SlotStep, StepPlan
from rayloom_engine.core.step_seconds import StepMeter, StepSeconds
from rayloom_engine.core.step_work import StepWork

WORK = StepWork(flops_per_token=100.0, flops_per_pair=2.0)


def _plan(num_decodes: int, *chunks: tuple[int, int], samples: bool = True) -> StepPlan:
    """`chunks`: (start, tokens)."""
    steps = [(50, 1)] * num_decodes + list(chunks)
    slots = tuple(
        SlotStep(slot=slot, start=start, num_tokens=num, samples=samples) for slot, (start, num) in enumerate(steps)
    )
    return StepPlan(step_id=1, epoch=1, slots=slots)


def _run(meter: StepMeter, plan: StepPlan, seconds: float) -> None:
    meter.submitted(plan)
    meter.ended(seconds)


def test_costs_are_known_once_a_decode_and_a_prompt_were_measured() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(1), 0.5)
    assert meter.costs() is None
    _run(meter, _plan(0, (0, 10)), 1.2)  # 10 x 100 + 100 x 2 = 1,200 operations
    assert meter.costs() == StepSeconds(decode_only=((1, 0.5),), token_s=0.1, pair_s=0.002)


def test_a_prompt_beside_decodes_costs_what_it_adds_to_their_step() -> None:
    meter = StepMeter(WORK)
    for _ in range(9):
        _run(meter, _plan(2), 1.0)
    _run(meter, _plan(2, (90, 10)), 7.0)  # 10 x 100 + 10 x 100 x 2 = 3,000 operations in 6 s
    costs = meter.costs()
    assert costs is not None
    assert (costs.token_s, costs.pair_s) == (pytest.approx(0.2), pytest.approx(0.004))
    # A step of 3 decodes was never measured. It counts as a step of 2 decodes and one more token.
    assert costs.decode_s(3) == pytest.approx(1.2)
    assert costs.decode_s(2) == costs.decode_s(1) == 1.0


def test_the_step_of_more_decodes_than_were_measured_alone_is_not_blamed_on_the_prompt() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(1), 1.0)
    _run(meter, _plan(11, (0, 10)), 3.2)  # 10 decodes more and 10 tokens: 1,000 + 1,200 operations in 2.2 s
    costs = meter.costs()
    assert costs is not None
    assert costs.token_s == pytest.approx(0.1)
    assert costs.decode_s(11) == pytest.approx(2.0)


def test_a_draft_token_costs_what_it_adds_to_the_step_of_its_decodes() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(0, (0, 10)), 1.2)
    for _ in range(9):
        _run(meter, _plan(1), 1.0)
    slot = SlotStep(slot=0, start=50, num_tokens=5, draft_token_ids=(1, 2, 3, 4), samples=True)
    before = meter.costs()
    assert before is not None and before.draft_token_s is None
    _run(meter, StepPlan(step_id=1, epoch=1, slots=(slot,)), 1.2)
    costs = meter.costs()
    assert costs is not None
    assert costs.draft_token_s == pytest.approx(0.05)
    assert (costs.decode_only, costs.token_s) == (before.decode_only, before.token_s), "drafts teach nothing else"


def test_one_slow_step_changes_nothing_and_a_lasting_change_does() -> None:
    meter = StepMeter(WORK)
    for _ in range(5):
        _run(meter, _plan(0, (0, 10)), 1.2)
        _run(meter, _plan(1), 0.5)
    _run(meter, _plan(1), 80.0)
    _run(meter, _plan(0, (0, 10)), 99.0)
    assert meter.costs() == StepSeconds(decode_only=((1, 0.5),), token_s=0.1, pair_s=0.002)
    for _ in range(5):
        _run(meter, _plan(1), 2.0)
    costs = meter.costs()
    assert costs is not None
    assert costs.decode_s(1) == 2.0


def test_a_token_becomes_cheaper_by_a_tenth_a_step_at_most_and_dearer_at_once() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(1), 0.5)
    for _ in range(9):
        _run(meter, _plan(0, (0, 10)), 12.0)  # 1 s a token
    token_s = []
    for _ in range(8):
        _run(meter, _plan(0, (0, 10)), 9.6)  # 0.8 s
        costs = meter.costs()
        assert costs is not None
        token_s.append(round(costs.token_s, 3))
    # The median of nine steps changes with the fifth new step.
    assert token_s == [1.0, 1.0, 1.0, 1.0, 0.9, 0.81, 0.8, 0.8]
    for _ in range(6):
        _run(meter, _plan(0, (0, 10)), 24.0)
    costs = meter.costs()
    assert costs is not None
    assert costs.token_s == pytest.approx(2.0)


def test_while_prompts_never_stop_both_costs_follow_the_time_of_the_steps() -> None:
    meter = StepMeter(WORK)
    for _ in range(9):
        _run(meter, _plan(2), 1.0)
        _run(meter, _plan(2, (0, 10)), 2.2)  # 10 x 100 + 100 x 2 = 1,200 operations in 1.2 s
    for _ in range(60):
        _run(meter, _plan(2, (0, 10)), 2.8)
    costs = meter.costs()
    assert costs is not None
    # A step with only decodes was measured less than 64 steps ago. So the meter attributes the whole change to the
    # prompts.
    assert (costs.decode_s(2), costs.token_s) == (1.0, pytest.approx(1.8 / 12))
    for _ in range(60):
        _run(meter, _plan(2, (0, 10)), 1.4)  # half of the time
    costs = meter.costs()
    assert costs is not None
    assert costs.decode_s(2) == pytest.approx(0.5, rel=0.2)
    assert costs.decode_s(2) + 12 * costs.token_s == pytest.approx(1.4, rel=0.02)
    for _ in range(9):
        _run(meter, _plan(2), 1.0)
    costs = meter.costs()
    assert costs is not None
    assert costs.decode_s(2) == 1.0


def test_a_step_that_is_nearly_all_prompt_tells_nothing_of_the_decodes() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(2), 1.0)
    for _ in range(80):
        _run(meter, _plan(2, (0, 100)), 31.0)  # 30,000 operations in 30 s
    for _ in range(9):
        _run(meter, _plan(2, (0, 100)), 61.0)
    costs = meter.costs()
    assert costs is not None
    assert (costs.decode_s(2), costs.token_s) == (1.0, pytest.approx(0.2))


def test_steps_that_sample_nothing_or_have_no_time_teach_nothing() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(1), 0.5)
    _run(meter, _plan(0, (0, 10), samples=False), 1.2)
    _run(meter, _plan(0, (0, 10)), 0.0)
    meter.submitted(_plan(0, (0, 10)))
    meter.forget()
    assert meter.costs() is None


def test_without_the_work_of_the_model_there_are_no_costs() -> None:
    meter = StepMeter(StepWork())
    _run(meter, _plan(1), 0.5)
    _run(meter, _plan(0, (0, 10)), 1.2)
    assert meter.costs() is None


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.lists(st.tuples(st.integers(0, 5000), st.integers(2, 512)), max_size=3),
            st.one_of(st.just(0.0), st.floats(1e-6, 10.0)),
        ),
        max_size=30,
    ),
    num_decodes=st.integers(1, 300),
)
def test_every_cost_is_positive_and_more_decodes_never_cost_less_than_the_nearest_measured(steps, num_decodes) -> None:
    meter = StepMeter(WORK)
    for decodes, chunks, seconds in steps:
        if decodes or chunks:
            _run(meter, _plan(decodes, *chunks), seconds)
    costs = meter.costs()
    if costs is not None:
        assert costs.token_s > 0
        assert costs.pair_s > 0
        assert list(costs.decode_only) == sorted(costs.decode_only)
        assert costs.decode_s(num_decodes) >= min(seconds for _, seconds in costs.decode_only) > 0


def _decode_plan(num_decodes: int) -> StepPlan:
    slots = tuple(SlotStep(slot=slot, start=50, num_tokens=1, samples=True) for slot in range(num_decodes))
    return StepPlan(step_id=1, epoch=1, slots=slots)


def test_a_pass_of_the_draft_model_is_known_after_three_steps_and_is_no_part_of_a_decode() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(0, (0, 10)), 1.2)
    for num_known in range(3):
        meter.submitted(_decode_plan(2))
        meter.ended(0.5, DraftWork(proposal_s=0.2, num_passes=4, num_served=2))
        costs = meter.costs()
        assert costs is not None
        assert costs.pass_s(2) == (pytest.approx(0.05) if num_known == 2 else None)
        assert costs.decode_s(2) == 0.5


def test_passes_for_few_and_for_many_slots_have_times_of_their_own() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(0, (0, 10)), 1.2)
    for num_served, pass_s in [(32, 0.8), (2, 0.1), (3, 0.1)] * 3:
        meter.submitted(_decode_plan(32))
        meter.ended(0.5, DraftWork(proposal_s=2 * pass_s, num_passes=2, num_served=num_served))
    costs = meter.costs()
    assert costs is not None
    assert costs.passes == ((3, 0.1), (32, 0.8)), "2 and 3 have the same bit length"
    assert [costs.pass_s(num) for num in (1, 3, 31, 32, 64)] == [0.1, 0.1, 0.1, 0.8, 0.8]


def test_only_passes_that_the_rank_has_computed_are_measured() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(0, (0, 10)), 1.2)
    for _ in range(5):
        meter.submitted(_decode_plan(2))
        # The slots were asked for proposals, but the draft model has only caught up with 20 tokens.
        meter.ended(0.5, DraftWork(catch_up_s=0.4, num_catch_up_tokens=20))
    costs = meter.costs()
    assert costs is not None
    assert (costs.pass_s(2), costs.draft_prompt_s) == (None, pytest.approx(0.02))


def test_a_pass_of_a_few_tokens_does_not_show_the_time_of_a_prompts_token() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(0, (0, 10)), 1.2)
    for num_tokens, known in ((15, None), (16, 0.02), (3, 0.02)):
        meter.submitted(_decode_plan(2))
        meter.ended(0.5, DraftWork(catch_up_s=0.32, num_catch_up_tokens=num_tokens))
        costs = meter.costs()
        assert costs is not None
        assert costs.draft_prompt_s == known


def test_the_draft_model_makes_the_tokens_of_a_prompt_slower() -> None:
    meter = StepMeter(WORK)
    _run(meter, _plan(1), 0.5)
    chunk = SlotStep(slot=0, start=0, num_tokens=10, samples=True)
    meter.submitted(StepPlan(step_id=1, epoch=1, slots=(chunk,)))  # 1,200 operations
    meter.ended(1.0, DraftWork(catch_up_s=0.2, num_catch_up_tokens=20))  # also tokens that it had left out
    costs = meter.costs()
    assert costs is not None
    assert (costs.token_s, costs.draft_prompt_s) == (pytest.approx(0.1), pytest.approx(0.01))
