"""Parsers of generated text on random texts and calls. Malformed texts are in test_message_parsing.py."""

from __future__ import annotations

import json
import keyword
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.reasoning_formats import QWEN3
from rayloom_engine.text.message_parsing.tool_formats import (
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3_XML,
    TOOL_FORMATS,
    ToolFormat,
)
from rt_messages import SCHEMAS, parsed, parser, parts_of

# Texts that contain tags, brackets and quotes more often than random texts.
BITS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "<function=weather>"),
        *("<parameter=city>", "</parameter>", "</function>", '{"name": "weather", "arguments": {', '{"name": "stop"}'),
        *("[stop()", "weather{", "<|channel|>analysis", "<|message|>", "<|end|>", "<|start|>assistant"),
        *("{", "}", "[", "]", ",", ";", '"', "'", "\\", "\n", " ", "<", "a", "Hello", "é", "(", ")", "=", "1"),
    ]
)
TEXTS = st.lists(BITS, max_size=14).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(cut_texts(), st.sampled_from([None, *TOOL_FORMATS.values()]), st.sampled_from([None, QWEN3]), st.booleans())
def test_a_message_does_not_depend_on_where_its_text_is_cut(
    pieces: list[str], format: ToolFormat | None, reasoning: Any, is_open: bool
) -> None:
    messages = []
    for each in (pieces, ["".join(pieces)], list("".join(pieces))):
        made = parser(format, reasoning=reasoning, is_open=is_open)
        message = Message()
        message.add(parts_of(made, each))
        assert made.num_tool_calls == len(message.tool_calls)
        messages.append(message)
    assert messages[0] == messages[1] == messages[2]


@settings(max_examples=300, deadline=None)
@given(
    cut_texts(),
    st.sampled_from([None, *TOOL_FORMATS.values()]),
    st.sampled_from([None, QWEN3]),
    st.booleans(),
    st.sets(st.integers(0, 8)),
)
def test_text_that_is_read_without_parts_is_that_of_one_part(
    pieces: list[str], format: ToolFormat | None, reasoning: Any, is_open: bool, skipped: set[int]
) -> None:
    """One parser gets pieces by `reads` where possible, and the other always by `add`.

    Both give the same list for each piece.
    """
    usual, made = (parser(format, reasoning=reasoning, is_open=is_open) for _ in range(2))
    for number, piece in enumerate([*pieces, "Hello", " you"]):
        kind = made.plain_kind if number not in skipped else None
        is_read = kind is not None and made.reads(piece, kind)
        found = [kind(piece)] if kind is not None and is_read else made.add(piece)
        assert found == usual.add(piece)
        assert made.reasoning_end == usual.reasoning_end
    assert made.finish() == usual.finish()
    assert (made.reasoning_end, made.num_tool_calls) == (usual.reasoning_end, usual.num_tool_calls)


NAMES = st.sampled_from(sorted(SCHEMAS))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


def written(format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of calls in a format."""
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    if format is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if format is LLAMA3_JSON:
        return "; ".join(texts)
    if format is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    assert format is HARMONY
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments, ensure_ascii=True)}<|call|>"
        for name, arguments in calls
    )


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([HERMES, LLAMA3_JSON, MISTRAL]), CALLS)
def test_random_calls_in_json_are_read_back(format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> None:
    content, _, found = parsed(format, written(format, calls))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


PYTHON_KEYS = KEYS.filter(lambda key: not keyword.iskeyword(key))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, st.dictionaries(PYTHON_KEYS, VALUES, max_size=3)), min_size=1, max_size=3))
def test_random_calls_in_python_are_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    _, _, found = parsed(PYTHONIC, f"[{', '.join(texts)}]")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20).filter(lambda text: "</parameter>" not in text), min_size=1, max_size=3))
def test_random_texts_in_tags_are_read_back(cities: list[str]) -> None:
    text = "".join(
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>\n"
        for city in cities
    )
    _, _, found = parsed(QWEN3_XML, text)
    assert [json.loads(arguments) for _, arguments in found] == [{"city": city} for city in cities]
