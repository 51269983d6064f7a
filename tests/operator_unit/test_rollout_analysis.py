"""The comparison of a new revision's first engine with the old ones: numbers that can be checked by hand."""

from datetime import timedelta

import pytest

from rayloom_operator.api.rollout import Analysis, Figures, Window
from rayloom_operator.decide.rollout.analysis import is_over, problem, since, total
from rayloom_operator.times import moment

RULE = Analysis.model_validate({"minRequests": 20, "maxErrorPercent": 1, "maxTtftRatio": 2})


def figures(requests=0, errors=0, **ttft):
    return Figures(requests=requests, errors=errors, ttft={edge.replace("_", "."): n for edge, n in ttft.items()})


def judged(new, old=None, *, is_over=True, begin=None):
    window = Window(time="2026-01-02T03:04:05Z", new=begin or Figures(), old=Figures())
    return problem(window, new, old or Figures(), RULE, is_over=is_over)


def latencies(upper, number=100):
    """Requests whose first tokens all came in the bucket that ends at `upper`; the edges are the engine's own."""
    edges = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5)
    return Figures(requests=number, ttft={str(edge): number if edge >= upper else 0 for edge in edges})


@pytest.mark.parametrize(
    ("requests", "errors", "is_wrong"),
    [
        (5, 1, True),  # At best 1 in 20, which is 5 %.
        (99, 1, True),  # 1.01 %
        (100, 1, False),  # 1 %
        (0, 0, False),
        (5, 0, False),
    ],
)
def test_failed_requests_count_before_the_time_is_over(requests, errors, is_wrong):
    assert bool(judged(figures(requests, errors), is_over=False)) is is_wrong


def test_what_fails_in_the_old_revision_as_well_is_no_fault_of_the_new_one():
    assert not judged(figures(100, 11), figures(100, 10))
    assert judged(figures(100, 12), figures(100, 10)) == (
        "12 of 100 requests failed in the new revision, 10 of 100 in the old; 1 % more are allowed."
    )


def test_one_failure_of_one_old_request_excuses_little():
    # 1 of 20 in the old are 5 %, and 6 % may fail.
    assert judged(figures(20, 2), figures(1, 1))


def test_only_what_was_counted_since_the_beginning_counts():
    assert not judged(figures(1040, 7), begin=figures(1000, 7))


def test_an_engine_that_started_anew_counts_from_nothing():
    assert since(figures(1000, 7, _5=900), figures(30, 2, _5=10)) == figures(30, 2, _5=10)
    assert since(figures(10, 1, _5=8), figures(30, 2, _5=20)) == figures(20, 1, _5=12)


def test_ten_times_slower_first_tokens_are_a_problem_once_the_time_is_over():
    slow, fast = latencies(2.5), latencies(0.25)

    assert judged(slow, fast, is_over=False) == ""
    assert judged(slow, fast) == (
        "99 % of first tokens take more than 1 s in the new revision, and at most 0.25 s in the old; 2 times as long "
        "is allowed."
    )


def test_neighbouring_buckets_prove_nothing():
    # 0.24 s and 0.26 s would look the same.
    assert judged(latencies(0.5), latencies(0.25)) == ""
    # More than 0.5 s are not surely more than twice 0.25 s.
    assert judged(latencies(0.75), latencies(0.25)) == ""
    assert judged(latencies(1.0), latencies(0.25)) != ""


def test_few_requests_do_not_make_a_quantile():
    assert judged(latencies(2.5, 19), latencies(0.1)) == ""
    assert judged(latencies(2.5), latencies(0.1, 19)) == ""
    assert judged(latencies(2.5, 20), latencies(0.1, 20)) != ""


def test_one_slow_request_of_a_hundred_is_not_among_the_99_percent():
    most = Figures(requests=100, ttft={"0.1": 99, "+Inf": 100})
    fewer = Figures(requests=100, ttft={"0.1": 98, "1": 98, "+Inf": 100})

    assert judged(most, latencies(0.1)) == ""
    assert "more than 1 s" in judged(fewer, latencies(0.1))


def test_engines_are_summed():
    assert total([figures(3, 1, _5=2), figures(4, 0, _5=1, _25=1)]) == figures(7, 1, _25=1, _5=3)


@pytest.mark.parametrize(
    ("num_new", "num_old", "ends_after_s"),
    [
        (20, 20, 60),
        (19, 20, 180),  # Only the new revision has too few: it is slow, or unlucky.
        (0, 1000, 180),
        (19, 19, 60),  # Few clients there are; time would change nothing.
        (20, 19, 60),
        (0, 0, 60),
    ],
)
def test_a_comparison_goes_on_for_three_times_as_long_while_only_the_new_revision_had_too_few(
    num_new, num_old, ends_after_s
):
    rule = RULE.model_copy(update={"hold_seconds": 60})
    # What was counted before the window does not count.
    window = Window(time="2026-01-02T03:04:05Z", new=latencies(0.1, 50), old=latencies(0.1, 70))
    new, old = latencies(0.1, 50 + num_new), latencies(0.1, 70 + num_old)

    def ends_after(seconds):
        return is_over(window, new, old, rule, moment(window.time) + timedelta(seconds=seconds))

    assert not ends_after(ends_after_s - 1)
    assert ends_after(ends_after_s)
