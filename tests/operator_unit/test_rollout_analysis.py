"""The comparison of a new revision's first engine with the old engines, with numbers that can be checked by hand."""

from datetime import timedelta

import pytest

from rayloom_operator.api.rollout.spec import Analysis
from rayloom_operator.api.rollout.state import AnalysisWindow, RequestCounts
from rayloom_operator.decide.rollout.analysis import is_over, longest_s, problem, since, total
from rayloom_operator.times import moment
from rt_rolling import FAILS_LATE, Rolling, make_desired

RULE = Analysis.model_validate({"minRequests": 20, "maxErrorPercent": 1, "maxTtftRatio": 2})


def figures(requests=0, errors=0, **ttft):
    return RequestCounts(
        requests=requests, errors=errors, first_token_seconds={edge.replace("_", "."): n for edge, n in ttft.items()}
    )


def judged(new, old=None, *, is_over=True, begin=None):
    window = AnalysisWindow(start_time="2026-01-02T03:04:05Z", new=begin or RequestCounts(), old=RequestCounts())
    return problem(window, new, old or RequestCounts(), RULE, is_over=is_over)


def latencies(upper, number=100):
    """Requests with all first tokens in the bucket that ends at `upper`.

    The bucket edges are some of the engine's edges.
    """
    edges = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5)
    return RequestCounts(
        requests=number, first_token_seconds={str(edge): number if edge >= upper else 0 for edge in edges}
    )


@pytest.mark.parametrize(
    ("requests", "errors", "is_wrong"),
    [
        (5, 1, True),  # Even with 20 requests, one failure would be 5 %.
        (99, 1, True),  # 1.01 %
        (100, 1, False),  # 1 %
        (0, 0, False),
        (5, 0, False),
    ],
)
def test_failed_requests_count_before_the_time_is_over(requests, errors, is_wrong):
    assert bool(judged(figures(requests, errors), is_over=False)) is is_wrong


def test_requests_that_fail_in_both_revisions_are_no_fault_of_the_new_one():
    assert not judged(figures(100, 11), figures(100, 10))
    assert judged(figures(100, 12), figures(100, 10)) == (
        "12 of 100 requests failed in the new revision, 10 of 100 in the old; 1 % more are allowed."
    )


def test_one_failure_of_one_old_request_excuses_little():
    # The old revision counts as having at least 20 requests. Its failure is 1 of 20, which is 5 %. So 6 % of the new
    # revision's requests may fail.
    assert judged(figures(20, 2), figures(1, 1))


def test_only_requests_since_the_beginning_count():
    assert not judged(figures(1040, 7), begin=figures(1000, 7))


def test_an_engine_that_restarted_counts_from_nothing():
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
    # Times of 0.24 s and 0.26 s would have the same buckets.
    assert judged(latencies(0.5), latencies(0.25)) == ""
    # The new times are only known to be above 0.5 s, and 0.5 s is not more than twice 0.25 s.
    assert judged(latencies(0.75), latencies(0.25)) == ""
    assert judged(latencies(1.0), latencies(0.25)) != ""


def test_few_requests_do_not_make_a_quantile():
    assert judged(latencies(2.5, 19), latencies(0.1)) == ""
    assert judged(latencies(2.5), latencies(0.1, 19)) == ""
    assert judged(latencies(2.5, 20), latencies(0.1, 20)) != ""


def test_one_slow_request_of_a_hundred_is_not_among_the_99_percent():
    most = RequestCounts(requests=100, first_token_seconds={"0.1": 99, "+Inf": 100})
    fewer = RequestCounts(requests=100, first_token_seconds={"0.1": 98, "1": 98, "+Inf": 100})

    assert judged(most, latencies(0.1)) == ""
    assert "more than 1 s" in judged(fewer, latencies(0.1))


def test_engines_are_summed():
    assert total([figures(3, 1, _5=2), figures(4, 0, _5=1, _25=1)]) == figures(7, 1, _25=1, _5=3)


@pytest.mark.parametrize(
    ("num_new", "num_old", "ends_after_s"),
    [
        (20, 20, 60),
        (19, 20, 180),  # Only the new revision has too few: it is slow, or gets few requests by chance.
        (0, 1000, 180),
        (19, 19, 60),  # There are few clients, and more time would change nothing.
        (20, 19, 60),
        (0, 0, 60),
    ],
)
def test_a_comparison_lasts_three_times_as_long_while_only_the_new_revision_has_too_few_requests(
    num_new, num_old, ends_after_s
):
    rule = RULE.model_copy(update={"hold_seconds": 60})
    # Requests before the window do not count.
    window = AnalysisWindow(start_time="2026-01-02T03:04:05Z", new=latencies(0.1, 50), old=latencies(0.1, 70))
    new, old = latencies(0.1, 50 + num_new), latencies(0.1, 70 + num_old)

    def ends_after(seconds):
        return is_over(window, new, old, rule, moment(window.start_time) + timedelta(seconds=seconds))

    assert not ends_after(ends_after_s - 1)
    assert ends_after(ends_after_s)


@pytest.mark.parametrize(
    ("hold_s", "num_new", "num_old", "ends_after_s"),
    [
        (5, 0, 1000, 40),  # gateways find the new engine within 35 s, and the hold is 5 s
        (5, 1, 1, 40),
        (5, 20, 1000, 5),  # The gateways have found the engine.
        (5, 0, 0, 5),  # Without requests there is nothing to wait for.
        (60, 0, 1000, 180),
        (60, 3, 3, 95),
        (0, 0, 1000, 0),
    ],
)
def test_behind_gateways_a_comparison_waits_until_they_find_the_new_engine(hold_s, num_new, num_old, ends_after_s):
    rule = RULE.model_copy(update={"hold_seconds": hold_s})
    window = AnalysisWindow(start_time="2026-01-02T03:04:05Z", new=latencies(0.1, 50), old=latencies(0.1, 70))
    new, old = latencies(0.1, 50 + num_new), latencies(0.1, 70 + num_old)

    def ends_after(seconds):
        wall = moment(window.start_time) + timedelta(seconds=seconds)
        return is_over(window, new, old, rule, wall, is_behind_gateways=True)

    assert not ends_after(ends_after_s - 1)
    assert ends_after(ends_after_s)
    assert ends_after_s <= longest_s(rule, is_behind_gateways=True)


def test_a_broken_revision_that_gateways_find_after_thirty_seconds_is_rolled_back():
    world = Rolling(make_desired(replicas=2, is_behind_gateways=True, analysis={"holdSeconds": 5, "minRequests": 10}))
    world.run(20)
    world.ask(revision=FAILS_LATE)
    world.run(40)
    assert (world.stored.step, world.stored.failure) == ("Analyzing", None)

    world.run(10)
    assert world.stored.failure.reason == "AnalysisFailed"
    assert not world.stored.is_promoted
