"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.text.stop_strings import StopAutomaton, StopStrings


def stop_strings(strings: list[str], *, include_in_output: bool = False) -> StopStrings:
    return StopStrings(StopAutomaton(strings), include_in_output=include_in_output)


def test_a_text_that_may_be_a_start_is_held_back() -> None:
    stops = stop_strings(["END"])
    assert [stops.add(piece) for piece in ("a", "bE", "N", "x")] == ["a", "b", "", "ENx"]
    assert stops.found is None


def test_a_stop_across_pieces_ends_the_text_before_it() -> None:
    stops = stop_strings(["END"])
    assert [stops.add(piece) for piece in ("aE", "N", "Dmore", "x")] == ["a", "", "", ""]
    assert stops.found == "END"
    assert stops.finish() == ""


def test_the_stop_can_be_kept() -> None:
    stops = stop_strings(["END"], include_in_output=True)
    assert [stops.add(piece) for piece in ("aEN", "Dmore")] == ["a", "END"]


def test_the_rest_comes_out_at_the_end() -> None:
    stops = stop_strings(["END"])
    assert (stops.add("xEN"), stops.finish()) == ("x", "EN")


def test_a_false_start_inside_a_stop_is_noticed() -> None:
    stops = stop_strings(["aab"])
    assert "".join(stops.add(char) for char in "xaaab") == "xa"
    assert stops.found == "aab"


def test_the_one_that_ends_first_wins_and_then_the_longest() -> None:
    first = stop_strings(["abcd", "bc"])
    assert (first.add("xabcd"), first.found) == ("xa", "bc")
    longest = stop_strings(["c", "abc"])
    assert (longest.add("xabc"), longest.found) == ("x", "abc")


def test_a_stop_that_ends_too_early_is_text() -> None:
    stops = stop_strings(["ab"])
    assert stops.add("ab", may_stop=False) == "ab"
    assert (stops.add("cab"), stops.found) == ("c", "ab")


def test_without_stops_text_is_let_through() -> None:
    assert stop_strings([]).add("anything") == "anything"


def test_sequences_of_a_request_share_one_automaton() -> None:
    automaton = StopAutomaton(["he", "she", "hers"])
    assert automaton.depth == [0, 1, 2, 1, 2, 3, 3, 4], "h he s sh she her hers"
    one, other = StopStrings(automaton), StopStrings(automaton)
    assert (one.add("xs"), other.add("h")) == ("x", "")
    assert (one.add("he"), one.found) == ("", "she"), "the longest of those that end here"
    assert (other.add("ers"), other.found) == ("", "he")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=st.text("abc", max_size=30),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_the_outcome_does_not_depend_on_the_cuts(text: str, strings: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    stops = stop_strings(strings)
    shown = "".join(stops.add(text[a:b]) for a, b in pairwise(borders)) + stops.finish()
    # The text must end at the first place where any stop string ends. Of several strings that end there, the longest
    # counts.
    ends = [(end, -len(s), s) for s in strings for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        assert (shown, stops.found) == (text, None)
    else:
        end, length, found = min(ends)
        assert (shown, stops.found) == (text[: end + length], found)
