"""Grammars of tool calls: valid calls are allowed, invalid calls are not, and the parser reads all allowed calls.

llguidance itself checks texts, with the embedded model's vocabulary. Other files test the engine's use of grammars.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from rayloom_engine.grammar.closed_schemas import closed
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.parser import ParserSettings, TextParser
from rayloom_engine.text.message_parsing.sink import CallRules
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
from rayloom_engine.text.tokenizer import Tokenizer
from rayloom_engine.text.tools.call_grammar import call_grammar, calls_or_form
from rayloom_engine.text.tools.tool import Tool, ToolUse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "kelvin"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
WEATHER = Tool(name="get_weather", parameters=SCHEMA, document={})
STRICT = Tool(name="get_weather", parameters=SCHEMA, is_strict=True, document={})
STOP = Tool(name="stop", parameters={"type": "object", "properties": {}}, document={})
ARGUMENTS = {"city": "Paris", "days": 3, "unit": "celsius", "near": [{"x": 1}]}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("builtin://smollm2-135m").path)


@functools.cache
def guided() -> llguidance.LLTokenizer:
    made = tokenizer()
    return llguidance.LLTokenizer(
        made.backend.to_str(), n_vocab=made.vocab_size, eos_token=made.backend.token_to_id("<|im_end|>")
    )


def matcher(lark: str) -> llguidance.LLMatcher:
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    assert llguidance.LLMatcher.validate_grammar(grammar, guided()) == ""
    return llguidance.LLMatcher(guided(), grammar)


def is_legal(lark: str | None, text: str) -> bool:
    """True if the grammar allows the whole text as an answer."""
    assert lark is not None
    made = matcher(lark)
    ids = tokenizer().encode(text, add_special_tokens=False)
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def use_of(*tools: Tool, mode: Any = "required", is_parallel: bool = True) -> ToolUse:
    return ToolUse(tools=tools, mode=mode, callable=tools, is_parallel=is_parallel)


def written(format: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the family's template writes them."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if format is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if format is LLAMA3_JSON:
        return "; ".join(text.replace('"arguments"', '"parameters"') for text in texts)
    if format is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    if format is GRANITE:
        return f"<|tool_call|>[{', '.join(texts)}]"
    if format is INTERNLM:
        texts = [text.replace('"arguments"', '"parameters"') for text in texts]
        return "\n".join(f"<|action_start|><|plugin|>\n{text}\n<|action_end|>" for text in texts)
    if format is PYTHONIC:
        return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in calls)}]"
    if format is QWEN3_XML:
        return "\n".join(f"<tool_call>\n<function={n}>\n{_tags(each)}</function>\n</tool_call>" for n, each in calls)
    [(name, arguments)] = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())


def _tags(arguments: dict[str, Any]) -> str:
    return "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )


ALL = pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=list(TOOL_FORMATS))


@ALL
@pytest.mark.parametrize("mode", ["required", "named"])
def test_a_forced_call_follows_its_schema(format: ToolFormat, mode: str) -> None:
    lark = call_grammar(use_of(WEATHER, mode=mode), format, {})

    def legal(arguments: dict[str, Any]) -> bool:
        return is_legal(lark, written(format, ("get_weather", arguments)))

    assert legal(ARGUMENTS)
    assert legal({"city": "Paris", "unit": "kelvin"})
    assert not legal({"city": "Paris"})
    assert not legal({"city": "Paris", "unit": "miles"})
    assert not legal({"town": "Paris", "unit": "kelvin"})
    assert not legal({"city": "Paris", "days": 10, "unit": "kelvin"})
    assert not legal({"city": "Paris", "days": "x", "unit": "kelvin"})
    assert not legal({"city": "Paris", "unit": "kelvin", "near": [{"y": 1}]})
    assert not is_legal(lark, written(format, ("get_time", ARGUMENTS)))
    assert not is_legal(lark, "Hello")
    assert not is_legal(lark, "")


@ALL
def test_a_function_without_parameters_has_an_empty_object(format: ToolFormat) -> None:
    lark = call_grammar(use_of(STOP), format, {})
    assert is_legal(lark, written(format, ("stop", {})))
    assert not is_legal(lark, written(format, ("stop", {"now": True})))


@pytest.mark.parametrize("format", [each for each in TOOL_FORMATS.values() if each is not HARMONY])
def test_only_parallel_calls_come_together(format: ToolFormat) -> None:
    two = written(format, ("stop", {}), ("get_weather", ARGUMENTS))
    assert is_legal(call_grammar(use_of(WEATHER, STOP), format, {}), two)
    assert not is_legal(call_grammar(use_of(WEATHER, STOP, is_parallel=False), format, {}), two)
    assert not is_legal(call_grammar(use_of(STOP, mode="named"), format, {}), written(format, *[("stop", {})] * 2))


@pytest.mark.parametrize("format", [each for each in TOOL_FORMATS.values() if each is not HARMONY])
def test_strict_tools_are_enforced_when_the_model_chooses(format: ToolFormat) -> None:
    lark = call_grammar(use_of(STRICT, STOP, mode="auto"), format, {})
    right = written(format, ("get_weather", ARGUMENTS))
    assert is_legal(lark, "Hello there, how are you?")
    assert is_legal(lark, "")
    assert is_legal(lark, right)
    assert is_legal(lark, right if format.first_openers else f"I look.\n{right}")
    assert not is_legal(lark, written(format, ("get_weather", {"town": "Paris"})))
    assert not is_legal(lark, written(format, ("get_time", {})))
    assert is_legal(lark, written(format, ("stop", {"now": 1}))) is (format not in (PYTHONIC,))


@ALL
def test_answers_are_free_without_a_strict_or_forced_tool(format: ToolFormat) -> None:
    assert call_grammar(use_of(WEATHER, STOP, mode="auto"), format, {}) is None
    assert call_grammar(use_of(STRICT, mode="none"), format, {}) is None


def test_tags_that_are_special_tokens_are_named_by_their_ids() -> None:
    special = {"<tool_call>": 3, "</tool_call>": 4}  # in this vocabulary <repo_name> and <reponame> have these ids
    for mode in ("required", "auto"):
        lark = call_grammar(use_of(STRICT, mode=mode), HERMES, special)
        text = written(HERMES, ("get_weather", ARGUMENTS)).replace("<tool_call>", "<repo_name>")
        assert is_legal(lark, text.replace("</tool_call>", "<reponame>"))
        assert not is_legal(lark, text.replace("get_weather", "x").replace("</tool_call>", "<reponame>"))
    assert not is_legal(call_grammar(use_of(STRICT), HERMES, special), written(HERMES, ("get_weather", ARGUMENTS)))


def test_newer_models_of_mistral_write_a_name_and_a_tag() -> None:
    special = {"[TOOL_CALLS]": 3, "[ARGS]": 4}
    lark = call_grammar(use_of(WEATHER), MISTRAL, special)
    text = f"<repo_name>get_weather<reponame>{json.dumps(ARGUMENTS)}"
    assert is_legal(lark, text)
    assert is_legal(lark, text * 2)


def test_an_opener_may_be_composed_of_special_tokens() -> None:
    special = {"<|action_start|>": 3, "<|plugin|>": 4, "<|action_end|>": 5}
    text = written(INTERNLM, ("get_weather", ARGUMENTS))
    tokens = {"<|action_start|>": "<repo_name>", "<|plugin|>": "<reponame>", "<|action_end|>": "<file_sep>"}
    for mode in ("required", "auto"):
        lark = call_grammar(use_of(STRICT, mode=mode), INTERNLM, special)
        right = functools.reduce(lambda before, tag: before.replace(tag, tokens[tag]), tokens, text)
        assert is_legal(lark, right)
        assert not is_legal(lark, right.replace("get_weather", "x"))
    assert not is_legal(call_grammar(use_of(STRICT), INTERNLM, special), text)


@pytest.mark.parametrize("format", [each for each in TOOL_FORMATS.values() if each is not LLAMA3_JSON])
def test_an_answer_is_calls_or_has_the_form_of_the_request(format: ToolFormat) -> None:
    form = grammar_of(StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}}))
    lark = calls_or_form(use_of(STRICT, mode="auto"), format, {}, form)
    assert is_legal(lark, '{"a": 1}')
    assert is_legal(lark, written(format, ("get_weather", ARGUMENTS)))
    assert not is_legal(lark, '{"a": "x"}')
    assert not is_legal(lark, written(format, ("get_weather", {"town": "x"})))
    assert not is_legal(lark, "Hello")


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_line_ends_may_come_between_reasoning_and_calls(format: ToolFormat) -> None:
    text = written(format, ("stop", {}))
    for is_after in (False, True):
        lark = call_grammar(use_of(STOP), format, {}, is_after_reasoning=is_after)
        assert is_legal(lark, text)
        assert is_legal(lark, f"\n\n{text}") is is_after


def test_a_keyword_that_cannot_be_enforced_is_an_error_only_for_strict_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (False, True):
        tool = Tool(name="f", parameters=schema, is_strict=is_strict, document={})
        for format in (HERMES, QWEN3_XML):
            lark = call_grammar(use_of(tool), format, {})
            assert lark is not None
            error = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(lark), guided())
            assert ("uniqueItems" in error) is is_strict


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"Paris"', "Paris"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"], "enum": ["a", None]}, '"a"', "a"),
        ({"type": "string", "const": "x"}, '"x"', "x"),
        ({"type": "string", "pattern": "^[0-9]{2}$"}, '"42"', "42"),
        ({"$ref": "#/$defs/name", "description": "A name."}, "5", "5"),
        ({"$ref": "#/$defs/unit"}, "7", "7"),
        ({"$ref": "#/$defs/name", "$comment": "Of a city."}, "5", "5"),
        ({"$ref": "#/$defs/name", "pattern": "^5$"}, '"5"', "5"),
        ({"type": "string", "enum": ["5", "a b"]}, "5", "5"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
    ],
)
def test_the_parser_reads_the_strings_that_a_grammar_of_tags_forces(schema: Any, written: str, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"key": schema},
        "required": ["key"],
        "$defs": {"name": {"type": "string"}, "unit": {"type": "string", "enum": ["5", "7"]}},
    }
    lark = call_grammar(use_of(Tool(name="f", parameters=parameters, document={})), QWEN3_XML, {})
    text = f"<tool_call>\n<function=f>\n<parameter=key>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert is_legal(lark, text)
    parser = TextParser(ParserSettings(tools=QWEN3_XML), CallRules(schemas={"f": parameters}, call_id=str))
    message = Message()
    message.add(parser.add(text) + parser.finish())
    assert json.loads(message.tool_calls[0].arguments) == {"key": value}


def test_a_grammar_of_tags_does_not_allow_any_text_for_an_empty_enumeration() -> None:
    parameters = {"type": "object", "properties": {"key": {"type": "string", "enum": []}}, "required": ["key"]}
    lark = call_grammar(use_of(Tool(name="f", parameters=parameters, document={})), QWEN3_XML, {})
    assert lark is not None
    assert "enum" in llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(lark), guided())


def test_a_grammar_of_tags_enforces_patterns_of_strings() -> None:
    parameters = {"type": "object", "properties": {"key": {"type": "string", "pattern": "^a+$"}}, "required": ["key"]}
    lark = call_grammar(use_of(Tool(name="f", parameters=parameters, document={})), QWEN3_XML, {})
    text = "<tool_call>\n<function=f>\n<parameter=key>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert [is_legal(lark, text.format(value)) for value in ('"aa"', '"b"', "b")] == [True, False, False]


def test_names_with_unusual_characters_are_quoted() -> None:
    schema = {"type": "object", "properties": {'é"\\': {"type": "string"}}, "required": ['é"\\']}
    tool = Tool(name="a-b_c", parameters=schema, document={})
    for format in (HERMES, QWEN3_XML, MISTRAL):
        text = written(format, ("a-b_c", {'é"\\': "x"})).replace("\\u00e9", "é")
        assert is_legal(call_grammar(use_of(tool), format, {}), text)


def sampled(lark: str, chance: random.Random, max_tokens: int = 300) -> str | None:
    """A random answer that the grammar allows, or None if it does not end. Ends of texts and objects are likely."""
    made = matcher(lark)
    ids: list[int] = []
    eos = tokenizer().backend.token_to_id("<|im_end|>")
    while len(ids) < max_tokens:
        mask = int.from_bytes(made.compute_bitmask(), "little")
        if mask >> eos & 1:
            return tokenizer().decode(ids)
        end = chance.choice(_long_ends())
        if made.validate_tokens(end) == len(end):
            new = end
        elif forced := made.compute_ff_tokens():
            new = forced
        else:
            enders = [each for each in _enders() if mask >> each & 1]
            allowed = [each for each in chance.sample(range(17, tokenizer().vocab_size), 400) if mask >> each & 1]
            new = [chance.choice(allowed[:3] + enders if enders else allowed or [_first(mask)])]
        assert made.consume_tokens(new)
        ids += new
    return None


END_TEXTS = ("\n</parameter>\n", "<|end|><|start|>assistant<|channel|>commentary to=functions.stop")


@functools.cache
def _long_ends() -> list[list[int]]:
    return [tokenizer().encode(text, add_special_tokens=False) for text in END_TEXTS]


@functools.cache
def _enders() -> tuple[int, ...]:
    """Tokens that end strings, objects and arguments."""
    made = tokenizer()
    return tuple(made.encode(text, add_special_tokens=False)[0] for text in ('"', "}", "]", ",", ")", "\n", "</"))


def _first(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


@ALL
def test_the_parser_reads_every_sampled_answer_and_its_arguments_are_valid(format: ToolFormat) -> None:
    chance = random.Random(5)
    lark = call_grammar(use_of(WEATHER, STOP), format, {})
    assert lark is not None
    schemas = {"get_weather": SCHEMA, "stop": STOP.parameters}
    num_read = 0
    for _ in range(8):
        text = sampled(lark, chance)
        if text is None:
            continue
        num_read += 1
        rules = CallRules(schemas=schemas, call_id=str)
        messages = []
        for pieces in ([text], list(text)):
            parser = TextParser(ParserSettings(tools=format, is_harmony=format is HARMONY), rules)
            message = Message()
            message.add([part for piece in pieces for part in parser.add(piece)] + parser.finish())
            messages.append(message)
        assert messages[0] == messages[1]
        assert messages[0].content == ""
        assert messages[0].tool_calls
        for call in messages[0].tool_calls:
            jsonschema.validate(json.loads(call.arguments), closed(schemas[call.name]))
    assert num_read >= 4
