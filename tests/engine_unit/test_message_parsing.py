"""Parsers of generated text: every format, whole and cut at every place, malformed texts, and ids of calls.

Random texts are in test_message_parsing_properties.py, grammars in test_tool_grammars.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayloom_engine.text.message_parsing.call_start import MAX_START_CHARS
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.reasoning_formats import QWEN3, REASONING_FORMATS
from rayloom_engine.text.message_parsing.tool_formats import (
    GRANITE,
    HARMONY,
    HERMES,
    INTERNLM,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3_XML,
    TOOL_FORMATS,
    ToolFormat,
)
from rayloom_engine.text.message_parts import Content, Reasoning, ToolCallArguments, ToolCallStart
from rt_messages import parsed, parser, parts_of

PARIS = '{"city": "Paris", "days": 3}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}',
    "pythonic": '[weather(city="Paris", days=3)]',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}<|action_end|>',
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_one_call_of_each_format(name: str) -> None:
    assert parsed(TOOL_FORMATS[name], WRITTEN[name]) == ("", "", [("weather", PARIS)])


TWO = [("weather", PARIS), ("stop", "{}")]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, WRITTEN["hermes"] + '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'),
        (HERMES, WRITTEN["hermes"] + '<tool_call>{"arguments": {}, "name": "stop"}'),
        (QWEN3_XML, WRITTEN["qwen3_xml"] + "\n<tool_call>\n<function=stop>\n</function>\n</tool_call>"),
        (QWEN3_XML, WRITTEN["qwen3_xml"] + "\n<function=stop></function>"),
        (LLAMA3_JSON, WRITTEN["llama3_json"] + '; {"name": "stop", "parameters": {}}'),
        (LLAMA3_JSON, "<|python_tag|>" + WRITTEN["llama3_json"] + ';{"parameters":{},"name":"stop"}'),
        (PYTHONIC, WRITTEN["pythonic"][:-1] + ", stop()]"),
        (PYTHONIC, "<|python_start|>" + WRITTEN["pythonic"][:-1] + ", stop()]<|python_end|>"),
        (MISTRAL, WRITTEN["mistral"][:-1] + ', {"name": "stop", "arguments": {}}]'),
        (MISTRAL, f"[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]stop{{}}"),
        (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{PARIS}[TOOL_CALLS]stop[ARGS]{{}}"),
        (GRANITE, WRITTEN["granite"][:-1] + ', {"name": "stop", "arguments": {}}]'),
        (GRANITE, f'<tool_call> [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "stop", "arguments": {{}}}}]'),
        (INTERNLM, WRITTEN["internlm"] + '\n<|action_start|><|plugin|>{"name": "stop", "parameters": {}}'),
        (HARMONY, WRITTEN["harmony"] + "<|start|>assistant<|channel|>commentary to=functions.stop<|message|>{}"),
        (
            HARMONY,
            WRITTEN["harmony"] + "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}<|call|>",
        ),
    ],
)
def test_two_calls(format: ToolFormat, text: str) -> None:
    assert parsed(format, text) == ("", "", TWO)


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (HERMES, "I look.\n\n" + WRITTEN["hermes"], ("I look.", "", TWO[:1])),
        (HERMES, WRITTEN["hermes"] + "\nDone.", ("Done.", "", TWO[:1])),
        (QWEN3_XML, "I look. " + WRITTEN["qwen3_xml"] + "\n", ("I look.", "", TWO[:1])),
        (MISTRAL, "I look." + WRITTEN["mistral"], ("I look.", "", TWO[:1])),
        (GRANITE, "I look." + WRITTEN["granite"] + "\n", ("I look.", "", TWO[:1])),
        (INTERNLM, "I look." + WRITTEN["internlm"] + "\n", ("I look.", "", TWO[:1])),
        (LLAMA3_JSON, "  " + WRITTEN["llama3_json"], ("", "", TWO[:1])),
        (LLAMA3_JSON, "I look. " + WRITTEN["llama3_json"], ("I look. " + WRITTEN["llama3_json"], "", [])),
        (HERMES, "Only text \n", ("Only text \n", "", [])),
        (HERMES, "", ("", "", [])),
        (HERMES, " \n", (" \n", "", [])),
        (None, WRITTEN["hermes"], (WRITTEN["hermes"], "", [])),
    ],
)
def test_content_next_to_calls(format: ToolFormat, text: str, expected: Any) -> None:
    assert parsed(format, text) == expected


def test_a_special_token_that_begins_an_opener_is_content_nowhere() -> None:
    hidden = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    assert parsed(INTERNLM, "I look." + WRITTEN["internlm"], hidden=hidden) == ("I look.", "", TWO[:1])
    assert parsed(INTERNLM, "a<|action_start|>b<|plugin|>c<|action_start|>", hidden=hidden) == ("abc", "", [])


NO_CALLS = [
    (HERMES, "<tool_call>"),
    (HERMES, "a <tool_call> tag"),
    (HERMES, "<tool_cal"),
    (HERMES, "1 < 2 <tool"),
    (HERMES, "<tool_call>\nweather(Paris)\n</tool_call>"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments"'),
    (HERMES, '<tool_call>{"name" "weather"}'),
    (HERMES, '<tool_call>{name: "weather"}'),
    (HERMES, '<tool_call>{"name": "wea\\'),
    (HERMES, '<tool_call>{"name": "stop", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    (PYTHONIC, "[weather(city='\\ud800')]"),
    (HERMES, '<tool_call>{"name": "\\ud800", "x": "\\u12"}'),
    (QWEN3_XML, "<tool_call>\n{}\n</tool_call>"),
    (QWEN3_XML, "<function=weather"),
    (QWEN3_XML, "<function=>"),
    (QWEN3_XML, "<function=a\nb>"),
    (QWEN3_XML, "<function=" + "x" * 500 + ">"),
    (LLAMA3_JSON, '{"name": "unknown", "parameters": {}}'),
    (LLAMA3_JSON, '{"name": "weather"}'),
    (LLAMA3_JSON, '{"temperature": 5}'),
    (LLAMA3_JSON, "{"),
    (LLAMA3_JSON, "{" * 2000),
    (PYTHONIC, "[1, 2, 3]"),
    (PYTHONIC, "[unknown(a=1)]"),
    (PYTHONIC, "[weather(1)]"),
    (PYTHONIC, "[weather(**x)]"),
    (PYTHONIC, "[weather(city=open('x'))]"),
    (PYTHONIC, "[weather(city=1e999)]"),
    (PYTHONIC, "[weather(city=1j)]"),
    (PYTHONIC, "[weather(city={1: 2})]"),
    (PYTHONIC, "[weather(city='Paris'"),
    (PYTHONIC, "[weather(city='Par"),
    (PYTHONIC, "[weather(city=" + "[" * 100 + "]" * 100 + ")]"),
    (PYTHONIC, "[weather(city=" + "-" * 3000 + "1)]"),
    (PYTHONIC, "[weather(city='" + "x" * 70000 + "')]"),
    (INTERNLM, "<|action_start|><|interpreter|>"),
    (INTERNLM, "<|action_start|>"),
    (GRANITE, "<|tool_call|>[]"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS] weather(Paris)"),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + "{}"),
    (MISTRAL, "[TOOL_CALLS][]"),
]


@pytest.mark.parametrize(("format", "text"), NO_CALLS, ids=[text[:40] for _, text in NO_CALLS])
def test_a_text_that_is_no_call_stays_content(format: ToolFormat, text: str) -> None:
    message = Message()
    message.add(parts_of(parser(format), [text]))
    assert (message.content, message.tool_calls) == (text, [])
    if len(text) < 4000:
        assert parsed(format, text) == (text, "", [])


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Par', [("weather", '{"city": "Par')]),
        (HERMES, '<tool_call>{"name": "stop", "arguments": {}', [("stop", "{}")]),
        (HERMES, '<tool_call>{"name": "stop", "arguments": {}}', [("stop", "{}")]),
        (HERMES, '<tool_call>{"name": "stop"}</tool_call>', [("stop", "{}")]),
        (HERMES, '<tool_call>{"name": "stop", "arguments": null}</tool_call>', [("stop", "{}")]),
        (HERMES, '<tool_call>{"name": "stop", "arguments": "{}"}</tool_call>', [("stop", "{}")]),
        (HERMES, '<tool_call>{"id": 7, "name": "stop", "arguments": {}, "x": [1]}</tool_call>', [("stop", "{}")]),
        (HERMES, '<tool_call>{"name":"new","arguments":{"a":"</tool_call>"}}', [("new", '{"a":"</tool_call>"}')]),
        (QWEN3_XML, "<function=stop>\n</function>", [("stop", "{}")]),
        (QWEN3_XML, "<function=stop>\n", [("stop", "{}")]),
        (QWEN3_XML, "<function=stop></tool_call>", [("stop", "{")]),
        (QWEN3_XML, "<function=weather><parameter=city>\nPa", [("weather", '{"city": "Pa')]),
        (QWEN3_XML, "<function=weather><parameter=days>\n3", [("weather", '{"days": ')]),
        (QWEN3_XML, "<function=weather><parameter=ci", [("weather", "{")]),
        (PYTHONIC, "[stop(), weather(city='Par", [("stop", "{}")]),
        (MISTRAL, '[TOOL_CALLS]weather{"city": "Par', [("weather", '{"city": "Par')]),
    ],
)
def test_a_call_that_is_cut_off(format: ToolFormat, text: str, expected: list[tuple[str, str]]) -> None:
    assert parsed(format, text)[2] == expected


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("city", "\n two  words\n\n", " two  words\n"),
        ("city", "3", "3"),
        ("city", '\na "b"\\\nc\n', 'a "b"\\\nc'),
        ("city", "", ""),
        ("city", "\n\n", ""),
        ("days", "\n3\n", 3),
        ("days", "3.0", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("near", '["a", "b"]', ["a", "b"]),
        ("near", "['a']", "['a']"),
        ("limit", "null", None),
        ("limit", "2.5", 2.5),
        ("limit", "NaN", "NaN"),
        ("limit", "1e999", "1e999"),
        ("near", "[1e999]", "[1e999]"),
        ("mode", "null", None),
        ("mode", "5", "5"),
        ("unknown", "5", "5"),
    ],
)
def test_values_of_tags_have_the_types_of_the_schema(key: str, written: str, expected: object) -> None:
    text = f"<tool_call><function=weather><parameter={key}>{written}</parameter></function></tool_call>"
    [(name, arguments)] = parsed(QWEN3_XML, text)[2]
    assert (name, json.loads(arguments)) == ("weather", {key: expected})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a=-1, b=[1, (2,)], c={'d': None}", {"a": -1, "b": [1, [2]], "c": {"d": None}}),
        ("a=true, b=null, c=False", {"a": True, "b": None, "c": False}),
        ("a='it\\'s )]', b=\"é\"", {"a": "it's )]", "b": "é"}),
        ("a='x' 'y'", {"a": "xy"}),
        ("from='a, b', best-of=[1, 2], in={'x=': '('},", {"from": "a, b", "best-of": [1, 2], "in": {"x=": "("}}),
        (r'a="\/", b="\ud83d\ude00", c="\x41"', {"a": "/", "b": "\U0001f600", "c": "A"}),
        ("a='x'\n    'y',\n    b=1,\n    b=2\n", {"a": "xy", "b": 2}),
        ('a="""say "b, c)" or 5" """, b="", c=1', {"a": 'say "b, c)" or 5" ', "b": "", "c": 1}),
        ("a=''''(\\'''', b='', c=1", {"a": "'('", "b": "", "c": 1}),
    ],
)
def test_literals_of_python(written: str, expected: object) -> None:
    [(_, arguments)] = parsed(PYTHONIC, f"[weather({written})]")[2]
    assert json.loads(arguments) == expected


@pytest.mark.parametrize(
    "written",
    [
        *("a=1]", "a<=1)", "a:=1)", "a==1)", "max-age=1)", "[a]=1)", "a=)", "a=#1\n)", "a=1,, b=2)"),
        *(",)", "a=*b)", "**a)", '"a=1")', 'a="""")'),
    ],
)
def test_text_that_is_no_call_of_python_is_content(written: str) -> None:
    assert parsed(PYTHONIC, f"[weather({written}]") == (f"[weather({written}]", "", [])


# Reasoning about calls that mentions their tags. The first characters after a tag show that no call follows.
MENTIONS = (
    "The name: Let me <tool_call> be used</think>A",
    "names <tool_call></think>A",
    "The name goes into <tool_call></tool_call></think>A",
    'It is <tool_call>{"name": ...}</tool_call>, so</think>A',
    'It is <tool_call>{name}, as in <tool_call>{"name": "a b"}</think>A',
)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Yes.", "Hm.", [])),
        ("Hm.\n</think>\n\nYes.", True, ("Yes.", "Hm.", [])),
        ("<think>Hm.</think>Yes.", True, ("Yes.", "Hm.", [])),
        ("Hm.", True, ("", "Hm.", [])),
        ("Hm.</thi", True, ("", "Hm.</thi", [])),
        ("<think>", False, ("", "", [])),
        ("<thin", False, ("<thin", "", [])),
        ("\n\nYes. <think>", False, ("\n\nYes. <think>", "", [])),
        ("</think>Yes.", True, ("Yes.", "", [])),
        ("a <tool_call></think>Yes.", True, ("Yes.", "a <tool_call>", [])),
        ("Hm.\n" + WRITTEN["hermes"], True, ("", "Hm.", TWO[:1])),
        ("Hm.</think>\n" + WRITTEN["hermes"], True, ("", "Hm.", TWO[:1])),
        *((text, True, ("A", text.removesuffix("</think>A"), [])) for text in MENTIONS),
        (f"Let me <tool_call> be{WRITTEN['hermes']}", True, ("", "Let me <tool_call> be", TWO[:1])),
        ("names <tool_call>", True, ("", "names <tool_call>", [])),
        ('names <tool_call>\n{"na', True, ("", 'names <tool_call>\n{"na', [])),
    ],
)
def test_reasoning(text: str, is_open: bool, expected: Any) -> None:
    tools = HERMES if "name" in text else None
    assert parsed(tools, text, reasoning=QWEN3, is_open=is_open) == expected


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "mistral", "granite", "internlm", "pythonic"])
def test_a_call_ends_the_reasoning_and_a_mention_of_its_tag_does_not(name: str) -> None:
    format = TOOL_FORMATS[name]
    opener = format.openers[0]
    written = WRITTEN[name] if WRITTEN[name].startswith(opener) else opener + WRITTEN[name]
    found = parsed(format, f"First {opener} is it.{written}", reasoning=QWEN3, is_open=True)
    assert found[:2] == ("", f"First {opener} is it.")
    assert found[2] != []


def test_text_after_a_mention_is_held_back_for_as_long_as_a_call_may_begin() -> None:
    made = parser(HERMES, reasoning=QWEN3, is_open=True)
    assert made.add("Use <tool_call>") == [Reasoning("Use")]
    blanks = "\n" * (MAX_START_CHARS - 1)
    assert (made.add(blanks), made.reasoning_end) == ([], None)
    assert made.add("\n{") == [Reasoning(f" <tool_call>{blanks}\n{{")]
    assert (made.add('"name": "stop"}'), made.reasoning_end) == ([Reasoning('"name": "stop"}')], None)
    quick = parser(HERMES, reasoning=QWEN3, is_open=True)
    assert quick.add("Use <tool_call> b") == [Reasoning("Use <tool_call> b")]


def test_misplaced_special_tokens_are_no_content() -> None:
    hidden = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    text = "a</think> b<tool_call>c</tool_call>d"
    assert parsed(HERMES, text, reasoning=QWEN3, hidden=hidden) == ("a bcd", "", [])
    mention = "a <tool_call>b</think>c"
    assert parsed(HERMES, mention, reasoning=QWEN3, is_open=True, hidden=hidden) == ("c", "a b", [])


def test_channels_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{WRITTEN['harmony']}"
    )
    assert parsed(HARMONY, text) == ("I look.", "They ask.", TWO[:1])
    assert parsed(HARMONY, "<|channel|>final<|message|>Yes.<|return|>") == ("Yes.", "", [])
    assert parsed(HARMONY, "<|channel|>analysis<|message|>Hm") == ("", "Hm", [])
    assert parsed(HARMONY, "Yes.") == ("Yes.", "", [])
    assert parsed(HARMONY, "<|channel|>fin") == ("", "", [])


def test_a_recipient_may_follow_the_role_at_the_end_of_the_prompt() -> None:
    call = f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>"
    assert parsed(HARMONY, call) == ("", "", TWO[:1])
    for text in (" to=functions.weather", " to=functions.weather is a recipient.", "  to the"):
        assert parsed(HARMONY, text) == (text, "", [])
    final = "<|channel|>final<|message|>Yes."
    assert parsed(HARMONY, f" to=functions.weather is it.{final}") == (" to=functions.weather is it.Yes.", "", [])


def test_text_that_begins_like_a_recipient_is_not_held_back() -> None:
    text = " to=functions.weather is the recipient of a message that calls the function named weather with arguments."
    assert parser(HARMONY).add(text) == [Content(text)]


def test_the_end_of_the_reasoning_is_a_position() -> None:
    made = parser(HERMES, reasoning=QWEN3)
    made.add("<think>Hm.")
    assert made.reasoning_end is None
    made.add("</think>\nYes")
    assert made.reasoning_end == len("<think>Hm.</think>")
    assert parser(HERMES).reasoning_end == 0


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = WRITTEN["hermes"] + '<tool_call>{"name": "stop"}</tool_call>Done.'
    assert parsed(HERMES, text, max_calls=1) == ("Done.", "", TWO[:1])


def test_a_start_has_the_id_and_comes_before_its_arguments() -> None:
    assert parts_of(parser(HERMES), [WRITTEN["hermes"][:60], WRITTEN["hermes"][60:]]) == [
        ToolCallStart(0, "id0", "weather"),
        ToolCallArguments(0, PARIS[: 60 - WRITTEN["hermes"].index(PARIS)]),
        ToolCallArguments(0, PARIS[60 - WRITTEN["hermes"].index(PARIS) :]),
    ]


def test_content_arrives_at_once_and_a_possible_tag_is_held_back() -> None:
    made = parser(HERMES)
    assert made.add("Hello") == [Content("Hello")]
    assert made.add(" <tool") == []
    assert made.add("box>") == [Content(" <toolbox>")]


def test_arguments_of_tags_stream_within_a_text() -> None:
    made = parser(QWEN3_XML)
    made.add("<function=weather><parameter=city>\n")
    assert made.add('Pa"r') == [ToolCallArguments(0, 'Pa\\"r')]
    assert made.add("\n</para") == []
    assert made.add("x") == [ToolCallArguments(0, "\\n</parax")]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_the_prompt_says_whether_the_reasoning_is_open(name: str) -> None:
    format = REASONING_FORMATS[name]
    assert format.is_open(f"user\nassistant\n{format.start}\n")
    assert not format.is_open(f"assistant\n{format.start}\n\n{format.end}\n\n")
    assert format.is_open(f"{format.start}earlier{format.end}answer\nuser\nassistant\n") is format.begins_open
    for question, begun, is_open in [
        ("", f"{format.start}It", True),
        ("", f"{format.start}Hm{format.end}It", False),
        (format.end, f"{format.start}It", True),
        (f"What is {format.start}?\n", "It", False),
        (f"What is {format.start}?\nIt\n", "It ", False),
    ]:
        assert format.is_open(f"user\n{question}assistant\n{begun}", continued=begun) is is_open
        assert format.is_open(f"user\n{question}assistant\n{format.start}\nIt", continued="It")
    assert parsed(None, f"{format.start}Hm.{format.end}\nYes.", reasoning=format) == ("Yes.", "Hm.", [])
