"""The target of an alias: shares follow the weights, users keep targets. A change of weights moves few users."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.front.gateway.models.target_choice import target_by_draw, target_by_key

KEYS = [f"user {number}" for number in range(2000)]
weights = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 100), min_size=1).filter(lambda it: any(it.values()))


def chosen(targets: dict[str, int]) -> dict[str, str]:
    return {key: target_by_key(tuple(targets.items()), key) for key in KEYS}


@pytest.mark.parametrize(
    ("draw", "model"), [(0.0, "chat"), (0.89, "chat"), (0.9, "next"), (0.99, "next"), (1 - 2**-53, "next")]
)
def test_a_draw_falls_into_the_parts_of_the_weights_in_order(draw: float, model: str) -> None:
    assert target_by_draw((("off", 0), ("chat", 90), ("next", 10), ("out", 0)), draw) == model


def test_users_have_the_same_target_in_every_process() -> None:
    targets = (("chat", 90), ("next", 10))
    users = [f"user {number}" for number in range(40)]
    assert [user for user in users if target_by_key(targets, user) == "next"] == [
        *("user 14", "user 15", "user 17", "user 25", "user 27", "user 35"),
    ]


@settings(max_examples=25, deadline=None)
@given(weights)
def test_shares_of_users_follow_the_weights(targets: dict[str, int]) -> None:
    counts = Counter(chosen(targets).values())
    for name, weight in targets.items():
        share = weight / sum(targets.values())
        # 5 standard deviations of a binomial count.
        assert abs(counts[name] - share * len(KEYS)) <= 5 * (len(KEYS) * share * (1 - share)) ** 0.5
        assert weight > 0 or counts[name] == 0


@settings(max_examples=25, deadline=None)
@given(weights, st.data())
def test_a_target_whose_weight_rises_gains_users_and_no_others_move(
    targets: dict[str, int], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(targets)))
    raised = {**targets, name: targets[name] + data.draw(st.integers(1, 50))}
    before, after = chosen(targets), chosen(raised)
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} <= {name}


@settings(max_examples=50, deadline=None)
@given(weights, st.permutations("abcde"), st.text())
def test_the_order_of_targets_does_not_matter(targets: dict[str, int], order: list[str], key: str) -> None:
    shuffled = tuple((name, targets[name]) for name in order if name in targets)
    assert target_by_key(shuffled, key) == target_by_key(tuple(targets.items()), key)


@settings(max_examples=50, deadline=None)
@given(weights, st.floats(0, 1, exclude_max=True))
def test_a_draw_never_reaches_a_target_without_weight(targets: dict[str, int], draw: float) -> None:
    assert targets[target_by_draw(tuple(targets.items()), draw)] > 0
