"""NgramIndex: the longest earlier occurrence of a sequence's last tokens, compared with a search without an index."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.speculation.ngram_index import MAX_READ, NgramIndex

LETTERS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def _naive(ids: Sequence[int], num: int, min_size: int, max_size: int) -> tuple[int, ...]:
    """The same draft, found by a comparison at all positions."""
    for size in range(min(max_size, len(ids) - 1), min_size - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[len(ids) - size :]:
                found = list(ids)
                for _ in range(num):
                    found.append(found[end + len(found) - len(ids)])
                return tuple(found[len(ids) :])
    return ()


@given(
    ids=LETTERS, parts=st.lists(st.integers(1, 9), min_size=1), sizes=st.tuples(st.integers(1, 4), st.integers(0, 4))
)
def test_a_draft_is_that_of_a_naive_search(ids, parts, sizes) -> None:
    min_size, max_size = sizes[0], sizes[0] + sizes[1]
    index = NgramIndex(min_size, max_size, max_candidates=1000)
    end = 0
    while end < len(ids):
        end = min(len(ids), end + parts[end % len(parts)])
        known = ids[:end]
        assert index.read(known)
        assert index.draft(known, 5) == _naive(known, 5, min_size, max_size)


@given(ids=LETTERS, max_candidates=st.integers(1, 4))
def test_a_draft_of_a_bounded_search_follows_an_occurrence_of_the_last_tokens(ids, max_candidates) -> None:
    index = NgramIndex(2, 4, max_candidates=max_candidates)
    assert index.read(ids)
    draft = index.draft(ids, 1)
    followers = {ids[end] for end in range(2, len(ids)) if ids[end - 2 : end] == ids[-2:]}
    assert (not draft and not followers) or draft[0] in followers


def test_the_longest_occurrence_counts_and_of_equal_ones_the_newest() -> None:
    index = NgramIndex(2, 3)
    ids = [1, 2, 3, 10, 9, 2, 3, 11, 8, 2, 3, 12, 1, 2, 3]
    assert index.read(ids)
    assert index.draft(ids, 2) == (10, 9), "three tokens are equal there, two at the other places"
    ids += [7, 2, 3]
    assert index.read(ids)
    assert index.draft(ids, 1) == (7,), "of three places with two equal tokens, the newest"


def test_a_draft_that_reaches_the_end_repeats() -> None:
    index = NgramIndex(1, 2)
    assert index.read([5, 6, 5, 6])
    assert index.draft([5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


def test_a_long_prompt_is_read_in_parts() -> None:
    ids = list(range(MAX_READ + 1))
    index = NgramIndex(2, 3, num_expected=len(ids))
    assert not index.read(ids)
    assert index.read(ids)
    ids += [17, 18]
    assert index.read(ids)
    assert index.draft(ids, 3) == (19, 20, 21)
