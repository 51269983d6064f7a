"""The number of concurrent reconciles: as many as the API server takes without making requests wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.kube.concurrency import ConcurrencyLimit


def calls(limit, number, seconds, kind="PATCH"):
    """Makes `number` requests, one after the other, that take `seconds(number of concurrent reconciles)`."""
    for _ in range(number):
        limit.took(kind, seconds(limit.value))
    return limit.value


def server(cores, seconds=0.010):
    """Requests take `seconds`, and longer in proportion where they share the cores."""
    return lambda at_once: seconds * max(1.0, at_once / cores)


@pytest.mark.parametrize(
    ("cores", "value"),
    [
        (16, 8),
        (4, 8),  # 7 at once take 1.75 times as long, so there is room for an eighth
        (1.5, 4),  # 4 at once take 2.7 times as long: neither room nor overload
        (1, 3),  # 4 take 4 times as long, 3 three times
        (0.25, 2),
    ],
)
def test_the_number_follows_the_cores_of_the_api_server(cores, value):
    limit = ConcurrencyLimit()
    limit.took("PATCH", 0.010)  # the shortest: a request that shares no core

    assert calls(limit, 1000, server(cores)) == value


def test_other_clients_that_crowd_the_api_server_lower_the_number():
    limit = ConcurrencyLimit()
    assert calls(limit, 1000, server(16)) == 8
    assert calls(limit, 1000, server(1)) == 3
    assert calls(limit, 1000, server(16)) == 8


def test_an_api_server_that_is_slow_by_nature_does_not_count_as_crowded():
    assert calls(ConcurrencyLimit(), 1000, lambda at_once: 2.0) == 8


def test_requests_of_another_kind_may_take_longer():
    limit = ConcurrencyLimit()
    for _ in range(1000):
        limit.took("GET", 0.005)
        limit.took("PATCH", 0.500)

    assert limit.value == 8


def test_a_request_of_some_milliseconds_has_waited_for_no_other():
    limit = ConcurrencyLimit()
    limit.took("GET", 0.0005)

    assert calls(limit, 1000, lambda at_once: 0.007, "GET") == 8  # 14 times the shortest, below twice 4 ms


def test_a_few_long_requests_do_not_lower_the_number():
    limit = ConcurrencyLimit()
    for number in range(1000):
        limit.took("PATCH", 10.0 if number % 3 == 0 else 0.010)

    assert limit.value == 8


def test_each_answer_429_lowers_the_number():
    limit = ConcurrencyLimit()
    assert calls(limit, 1000, server(16)) == 8
    found = []
    for _ in range(6):
        limit.refused()
        found.append(limit.value)

    assert found == [6, 5, 4, 3, 2, 2]


def test_an_api_server_that_moved_further_away_counts_as_crowded_for_a_while_only():
    limit = ConcurrencyLimit()
    calls(limit, 1000, server(16, 0.010))
    assert calls(limit, 1000, server(16, 0.100)) == 2
    # 100 - 90 * 0.99997^n is 50, which is half, at n = 19,600.
    assert calls(limit, 18_000, server(16, 0.100)) == 2
    assert calls(limit, 2_000, server(16, 0.100)) == 8


@given(st.lists(st.tuples(st.sampled_from(["GET", "PATCH", "refused"]), st.floats(0, 1e4)), max_size=300))
def test_at_least_two_and_at_most_eight_run_whatever_requests_take(told):
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
