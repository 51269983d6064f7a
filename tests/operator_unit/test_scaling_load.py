"""The load of engines by hand: (seconds of the queue / half of the goal) + (running tokens / tokens that can run)."""

import pytest

from rayloom_operator.decide.scaling.load import EngineLoad, Held, load_of

GOAL_S = 2.0


def engine(**figures):
    """An engine that computes 1000 prompt tokens a second and has room for 10000 tokens; idle by default."""
    figures = {"max_running_tokens": 10_000, "prefill_per_s": 1000.0, "decode_per_s": 100.0, **figures}
    return EngineLoad(is_known=figures.pop("is_known", True), **figures)


def test_a_queue_that_takes_half_of_the_goal_and_a_full_cache_are_one_engine_each():
    assert load_of([engine(queued_tokens=1000)], Held(), GOAL_S).engines == pytest.approx(1)
    assert load_of([engine(running_tokens=10_000)], Held(), GOAL_S).engines == pytest.approx(1)
    both = load_of([engine(queued_tokens=500), engine(running_tokens=2500)], Held(), GOAL_S)
    assert both.engines == pytest.approx(0.75)
    assert (both.inputs.queued_tokens, both.inputs.running_tokens, both.inputs.needed_engines) == (500, 2500, "0.75")
    assert both.inputs.tokens_per_second == 2000


def test_behind_full_slots_a_queue_waits_for_outputs_to_end():
    full = engine(running_tokens=9500, queued_tokens=100, num_waiting=4, mean_output_tokens=50.0)
    # The prompts take 0.1 s, and 4 x 50 tokens take 2 s at 100 tokens/s.
    assert load_of([full], Held(), GOAL_S).engines == pytest.approx(0.95 + 2.1)
    some_room = engine(running_tokens=9400, queued_tokens=100, num_waiting=4, mean_output_tokens=50.0)
    assert load_of([some_room], Held(), GOAL_S).engines == pytest.approx(0.94 + 0.1)


def test_a_new_engine_is_judged_by_the_rate_of_the_others():
    new = engine(prefill_per_s=None, queued_tokens=500)
    found = load_of([engine(), new], Held(), GOAL_S)
    assert (found.engines, found.is_complete) == (pytest.approx(0.5), True)
    assert load_of([new], Held(), GOAL_S).is_complete is False
    assert (
        load_of([engine(prefill_per_s=None)], Held(), GOAL_S).is_complete is True
    )  # nothing waits, so no rate is needed


def test_an_engine_that_says_nothing_makes_the_load_incomplete():
    found = load_of([engine(running_tokens=5000), engine(is_known=False)], Held(), GOAL_S)
    assert (found.engines, found.is_complete, found.inputs.engines) == (pytest.approx(0.5), False, 1)


def test_held_requests_are_load_and_keep_a_service_from_being_idle():
    assert load_of([engine()], Held(), GOAL_S).is_idle is True
    assert load_of([engine()], Held(tokens=500, requests=1), GOAL_S).engines == pytest.approx(0.5)
    assert load_of([], Held(tokens=0, requests=1), GOAL_S).is_idle is False
    assert load_of([engine(is_known=False)], Held(), GOAL_S).is_idle is False


def test_held_tokens_are_load_at_the_rate_of_engines_that_have_ended():
    # 4000 tokens take 4 s at 1000/s, and a queue may take half of the goal.
    asleep = load_of([], Held(tokens=4000, requests=3), GOAL_S, earlier_per_s=1000.0)
    assert (asleep.engines, asleep.inputs.tokens_per_second) == (pytest.approx(4 / (GOAL_S / 2)), 1000)
    assert load_of([], Held(tokens=4000, requests=3), GOAL_S).engines == 0


def test_a_report_with_a_tiny_rate_is_a_large_load_and_no_error():
    engine = EngineLoad(is_known=True, queued_tokens=1 << 53, max_running_tokens=1, prefill_per_s=1e-300)
    assert load_of([engine] * 2, Held(), 1e-3).engines == 99_999
