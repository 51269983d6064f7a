"""Shares of tenants over several engines."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.routing.fairness import HeldRequest, in_turns, tokens_before


def held(*entries: tuple[str, str, float]) -> list[HeldRequest]:
    return [HeldRequest(request_id=name, tenant=tenant, arrival=arrival) for name, tenant, arrival in entries]


def test_tenants_take_turns_and_sequences_on_engines_count() -> None:
    requests = held(("a1", "a", 1.0), ("a2", "a", 2.0), ("b1", "b", 3.0), ("c1", "c", 4.0))

    # Without running sequences, a1, b1 and c1 have position 0, and a2 position 1.
    assert [each.request_id for each in in_turns(requests, {})] == ["a1", "b1", "c1", "a2"]
    # With two sequences of b on engines, b1 has position 2.
    assert [each.request_id for each in in_turns(requests, {"b": 2})] == ["a1", "c1", "a2", "b1"]


TENANTS = st.sampled_from("abc")


@given(st.lists(st.tuples(TENANTS, st.integers(0, 5)), max_size=20), st.dictionaries(TENANTS, st.integers(0, 4)))
def test_no_tenant_starts_more_than_one_ahead_of_a_tenant_that_still_waits(
    entries: list[tuple[str, int]], running: dict[str, int]
) -> None:
    requests = held(*((f"{number}", tenant, float(arrival)) for number, (tenant, arrival) in enumerate(entries)))
    order = in_turns(requests, running)
    left = Counter(each.tenant for each in requests)
    count = Counter(running)

    assert sorted(each.request_id for each in order) == sorted(each.request_id for each in requests)
    for request in order:
        assert all(count[request.tenant] <= count[tenant] for tenant in left if left[tenant] > 0)
        count[request.tenant] += 1
        left[request.tenant] -= 1


def test_a_flood_of_another_tenant_counts_only_up_to_the_own_share() -> None:
    # The tenants take turns. So while the 100 tokens of the prompt are computed, the flood gets only 100 of its 50,000
    # tokens.
    assert tokens_before("b", 100, {"a": 50_000}) == 100
    assert tokens_before("b", 100, {"a": 40}) == 40
    # 30 other tokens of b come before the prompt, so the flood gets 130.
    assert tokens_before("b", 100, {"a": 50_000, "b": 30, "c": 10}) == 30 + 130 + 10
    assert tokens_before("a", 100, {"a": 50_000, "b": 30}) == 50_030


@given(st.dictionaries(TENANTS, st.integers(0, 1000)), TENANTS, st.integers(1, 500))
def test_tokens_before_a_prompt_are_at_least_the_own_and_at_most_all(
    outstanding: dict[str, int], tenant: str, prompt_tokens: int
) -> None:
    before = tokens_before(tenant, prompt_tokens, outstanding)

    assert outstanding.get(tenant, 0) <= before <= sum(outstanding.values())
    if set(outstanding) <= {tenant}:
        assert before == sum(outstanding.values())
