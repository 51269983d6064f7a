"""The choice of an engine: examples with numbers to check by hand, and properties over random engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.routing.rendezvous import TIE_BLOCKS, first_by_rendezvous, tie_key
from rayloom_engine.routing.router import EngineView, choose

KEY = b"key"


def engine(name: str, *, cached: int = 0, outstanding: int = 0, decodes: int = 0) -> EngineView:
    return EngineView(name=name, cached_tokens=cached, outstanding_prefill_tokens=outstanding, num_decodes=decodes)


# The prompt has 1,000 tokens; a decode costs as much as 2 tokens of prefill. The comments show the scores of a, b and
# c.
EXAMPLES = {
    "a cached prefix decides between idle engines": (
        [engine("a"), engine("b", cached=512)],  # 1000, 488
        "b",
    ),
    "a prefix of 512 tokens is worth waiting for 500 tokens": (
        [engine("a"), engine("b", cached=512, outstanding=500)],  # 1000, 988
        "b",
    ),
    "but not for 600": (
        [engine("a"), engine("b", cached=512, outstanding=600)],  # 1000, 1088
        "a",
    ),
    "40 decodes weigh 80 tokens": (
        [engine("a", decodes=40), engine("b", outstanding=79)],  # 1080, 1079
        "b",
    ),
    "less waiting prefill decides without prefixes": (
        [engine("a", outstanding=300), engine("b", outstanding=100), engine("c", outstanding=200)],
        "b",
    ),
    "the last token is computed even if all are cached": (
        [engine("a", cached=1000, decodes=1), engine("b", cached=998)],  # 1 + 2 = 3, 2
        "b",
    ),
    "no engine": ([], None),
}


@pytest.mark.parametrize(("engines", "chosen"), EXAMPLES.values(), ids=EXAMPLES)
def test_worked_example(engines: list[EngineView], chosen: str | None) -> None:
    assert choose(engines, prompt_tokens=1000, decode_token_cost=2.0, tie_key=KEY) == chosen


def test_equal_engines_share_the_keys_and_each_key_has_its_engine() -> None:
    engines = [engine(name) for name in ("a", "b", "c", "d")]
    keys = [number.to_bytes(2, "big") for number in range(4000)]

    chosen = [choose(engines, prompt_tokens=10, decode_token_cost=1.0, tie_key=key) for key in keys]

    assert chosen == [choose(engines[::-1], prompt_tokens=10, decode_token_cost=1.0, tie_key=key) for key in keys]
    # Each engine gets 1,000 keys on average; the standard deviation is 27.
    assert all(900 < chosen.count(name) < 1100 for name in ("a", "b", "c", "d"))


ENGINES = st.lists(
    st.builds(
        EngineView,
        name=st.uuids().map(str),
        outstanding_prefill_tokens=st.integers(0, 40),
        num_decodes=st.integers(0, 5),
        cached_tokens=st.integers(0, 30),
    ),
    max_size=8,
    unique_by=lambda view: view.name,
)
PROMPT = st.integers(1, 60)
COST = st.sampled_from((0.0, 0.5, 1.0, 3.0))
KEYS = st.binary(max_size=4)


@given(ENGINES, PROMPT, COST, KEYS, st.randoms(use_true_random=False))
def test_the_order_of_the_engines_changes_nothing(
    engines: list[EngineView], prompt_tokens: int, cost: float, key: bytes, random
) -> None:
    shuffled = list(engines)
    random.shuffle(shuffled)

    assert choose(engines, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key) == choose(
        shuffled, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key
    )


@given(ENGINES, PROMPT, COST, KEYS)
def test_an_engine_is_chosen_if_there_is_one_and_none_is_cheaper(
    engines: list[EngineView], prompt_tokens: int, cost: float, key: bytes
) -> None:
    chosen = choose(engines, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key)

    scores = {
        view.name: max(1, prompt_tokens - view.cached_tokens)
        + view.outstanding_prefill_tokens
        + cost * view.num_decodes
        for view in engines
    }
    if not scores:
        assert chosen is None
    else:
        # The tie key decides only between equal scores. So it never overrides a prefix that saves a token.
        assert chosen is not None
        assert scores[chosen] == min(scores.values())


@given(ENGINES, PROMPT, COST, KEYS, st.integers(0, 7))
def test_the_choice_stays_when_another_engine_leaves(
    engines: list[EngineView], prompt_tokens: int, cost: float, key: bytes, pick: int
) -> None:
    chosen = choose(engines, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key)
    others = [view for view in engines if view.name != chosen]
    if not others:
        return
    leaving = others[pick % len(others)]

    left = [view for view in engines if view is not leaving]
    assert choose(left, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key) == chosen


@given(ENGINES, PROMPT, COST, KEYS, st.integers(1, 100))
def test_more_work_never_attracts_and_a_longer_prefix_never_repels(
    engines: list[EngineView], prompt_tokens: int, cost: float, key: bytes, more: int
) -> None:
    chosen = choose(engines, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key)
    for view in engines:
        busier = replace(view, outstanding_prefill_tokens=view.outstanding_prefill_tokens + more)
        richer = replace(view, cached_tokens=view.cached_tokens + more)
        other = busier if view.name != chosen else richer
        changed = [other if each is view else each for each in engines]

        assert choose(changed, prompt_tokens=prompt_tokens, decode_token_cost=cost, tie_key=key) == chosen


def test_a_key_moves_only_if_its_engine_leaves() -> None:
    names = ["a", "b", "c"]
    for number in range(200):
        key = number.to_bytes(2, "big")
        first = first_by_rendezvous(names, key)
        for gone in names:
            if gone != first:
                assert first_by_rendezvous([name for name in names if name != gone], key) == first


def test_prompts_with_the_same_first_blocks_have_the_same_tie_key() -> None:
    first = [bytes([number]) * 16 for number in range(TIE_BLOCKS)]

    assert tie_key([*first, b"x" * 16], b"request 1") == tie_key([*first, b"y" * 16], b"request 2")
    assert tie_key(first[:2], b"request 1") == first[1]
    assert tie_key([], b"request 1") == b"request 1"
