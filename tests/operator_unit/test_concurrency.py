"""How many passes run at once: the more the API server takes, and never so many that calls wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.kube.concurrency import ConcurrencyLimit


def calls(limit, number, seconds, kind="PATCH"):
    """`number` calls after each other, that take `seconds(how many passes run at once)`."""
    for _ in range(number):
        limit.took(kind, seconds(limit.value))
    return limit.value


def server(cores, seconds=0.010):
    """Calls take `seconds`, and those that have no core to themselves so much longer."""
    return lambda at_once: seconds * max(1.0, at_once / cores)


@pytest.mark.parametrize(
    ("cores", "value"),
    [
        (16, 8),
        (4, 8),  # 7 at once take 1.75 times as long, so there is room for an eighth
        (1.5, 4),  # 4 at once take 2.7 times as long: neither room nor a crowd
        (1, 3),  # 4 take 4 times as long, 3 three times
        (0.25, 2),
    ],
)
def test_as_many_run_as_the_server_has_cores_and_some_that_wait(cores, value):
    limit = ConcurrencyLimit()
    limit.took("PATCH", 0.010)  # the shortest, which a call takes that is alone

    assert calls(limit, 1000, server(cores)) == value


def test_others_that_crowd_the_server_leave_less_of_it():
    limit = ConcurrencyLimit()
    assert calls(limit, 1000, server(16)) == 8
    assert calls(limit, 1000, server(1)) == 3
    assert calls(limit, 1000, server(16)) == 8


def test_a_server_that_is_slow_by_nature_is_not_crowded():
    assert calls(ConcurrencyLimit(), 1000, lambda at_once: 2.0) == 8


def test_calls_of_another_kind_may_take_longer():
    limit = ConcurrencyLimit()
    for _ in range(1000):
        limit.took("GET", 0.005)
        limit.took("PATCH", 0.500)

    assert limit.value == 8


def test_a_call_of_some_milliseconds_waits_for_nobody():
    limit = ConcurrencyLimit()
    limit.took("GET", 0.0005)

    assert calls(limit, 1000, lambda at_once: 0.007, "GET") == 8  # 14 times the shortest, below twice 4 ms


def test_a_few_calls_that_take_long_are_no_crowd():
    limit = ConcurrencyLimit()
    for number in range(1000):
        limit.took("PATCH", 10.0 if number % 3 == 0 else 0.010)

    assert limit.value == 8


def test_a_server_that_says_it_has_too_much_to_do_gets_less_at_once():
    limit = ConcurrencyLimit()
    assert calls(limit, 1000, server(16)) == 8
    found = []
    for _ in range(6):
        limit.refused()
        found.append(limit.value)

    assert found == [6, 5, 4, 3, 2, 2]


def test_a_server_that_has_moved_further_away_is_taken_for_crowded_for_a_while_only():
    limit = ConcurrencyLimit()
    calls(limit, 1000, server(16, 0.010))
    assert calls(limit, 1000, server(16, 0.100)) == 2
    # 100 - 90 * 0.99997^n is 50, which is half, at n = 19,600.
    assert calls(limit, 18_000, server(16, 0.100)) == 2
    assert calls(limit, 2_000, server(16, 0.100)) == 8


@given(st.lists(st.tuples(st.sampled_from(["GET", "PATCH", "refused"]), st.floats(0, 1e4)), max_size=300))
def test_at_least_two_and_at_most_eight_run_whatever_calls_take(told):
    limit = ConcurrencyLimit()
    for kind, seconds in told:
        limit.refused() if kind == "refused" else limit.took(kind, seconds)
        assert 2 <= limit.value <= 8


def test_a_fixed_number_stays_whatever_requests_take():
    limit = ConcurrencyLimit(3)
    assert calls(limit, 1000, server(16)) == 3
    assert calls(limit, 1000, server(0.25)) == 3
    limit.refused()
    assert limit.value == 3
