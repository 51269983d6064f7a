"""Values in messages are written as JSON, are short, and cost little time however large the value is."""

from __future__ import annotations

import pytest

from rayloom_engine.common.json_words import SHOWN_CHARS, first_of, shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (5, "5"),
        (1.5, "1.5"),
        (float("inf"), "Infinity"),
        ("it's", '"it\'s"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("naïve", '"naïve"'),
        ([], "[]"),
        (["a", None, [True]], '["a", null, [true]]'),
        (("a", 1), '["a", 1]'),
        ({}, "{}"),
        ({"type": "text"}, '{"type": "text"}'),
        ({7: -1.0}, '{"7": -1.0}'),
        (b"x", "b'x'"),
    ],
    ids=str,
)
def test_values_are_written_as_json(value: object, expected: str) -> None:
    assert shown(value) == expected


def test_a_longer_text_is_cut() -> None:
    assert shown("a" * 78) == '"' + "a" * 78 + '"'
    assert shown("a" * 79) == '"' + "a" * 76 + "..."
    for value in ("x" * 10**6, list(range(10**6)), {str(key): "y" * 1000 for key in range(1000)}, 10**308):
        assert len(shown(value)) == SHOWN_CHARS
        assert shown(value).endswith("...")


def test_an_integer_with_thousands_of_digits_is_named_by_its_size() -> None:
    assert shown(10**5000) == "an integer of 16610 bits"


def test_only_the_shown_part_of_a_value_is_encoded() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "[" * 77 + "..."


def test_of_many_values_a_message_names_the_first_and_the_number_of_the_others() -> None:
    assert first_of(["a", None], 2) == '"a", null'
    assert first_of(["a", "b", "c", "d"], 2) == '"a", "b" and 2 more'
    assert first_of({"x": 1, "y": 2}, 1, str.upper) == "X and 1 more"
    assert first_of([], 2) == ""
