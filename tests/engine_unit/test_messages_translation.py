"""Messages requests become chat requests.

Blocks become messages, and options get the names of chat requests. Errors name fields as the client's request does.
"""

from __future__ import annotations

from typing import Any

import pytest

from rayloom_engine.errors import RequestError
from rayloom_engine.front.anthropic.request import CountTokensRequest, MessagesRequest
from rayloom_engine.front.anthropic.translation import translate, translate_prompt
from rayloom_engine.front.openai.chat.translated import TranslatedChat
from rayloom_engine.front.openai.fields.parsing import parse_request

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}},
}
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Köln"}}
CHAT_CALL = {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}


def chat(**fields: Any) -> dict[str, Any]:
    return translate(parse_request(MessagesRequest, {"messages": HI, "max_tokens": 2048, **fields})).document


def history(*messages: Any) -> list[dict[str, Any]]:
    return chat(messages=list(messages))["messages"]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def refusal(**fields: Any) -> RequestError:
    """The error of a request, with the field names of this request."""
    with pytest.raises(RequestError) as refused:
        translated = translate(parse_request(MessagesRequest, {"messages": HI, "max_tokens": 2048, **fields}))
        with translated.own_names():
            translated.request().sampling()
    return refused.value


def test_texts_and_blocks_become_messages_and_system_comes_first() -> None:
    said = {"role": "assistant", "content": [text("c"), text("d")]}
    document = chat(
        system=[text("Be brief."), text("Be kind.")],
        messages=[{"role": "user", "content": [text("a"), text("b")]}, said, *HI],
    )
    assert document["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "Hi"},
    ]


def test_a_turn_with_thinking_and_a_tool_is_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("sunny")]}
    assert history(
        {"role": "assistant", "content": [thinking, redacted, text("I look."), USE]},
        {"role": "user", "content": [result, {**result, "tool_use_id": "t2", "content": None}, text("And?")]},
    ) == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And?"},
    ]


def test_a_call_without_text_has_no_content() -> None:
    assert history({"role": "assistant", "content": [USE]}, *HI)[0]["content"] is None


def test_a_last_message_of_the_assistant_is_continued() -> None:
    document = chat(messages=[*HI, {"role": "assistant", "content": "The best answer is ("}])
    assert (document["continue_final_message"], document["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat()


@pytest.mark.parametrize("content", ["", [], [text("\n")]])
def test_an_empty_last_message_of_the_assistant_begins_a_new_answer(content: Any) -> None:
    assert chat(messages=[*HI, {"role": "assistant", "content": content}]) == chat()


def test_the_billing_header_of_claude_code_is_left_out() -> None:
    header = text("x-anthropic-billing-header: cc_version=2.1; cch=d1d48;")
    assert chat(system=[header, text("Be brief.")])["messages"][0] == {"role": "system", "content": "Be brief."}
    assert chat(system=[header]) == chat()


def test_system_messages_between_others_keep_their_place() -> None:
    assert [each["role"] for each in history(*HI, {"role": "system", "content": [text("now")]}, *HI)] == [
        "user",
        "system",
        "user",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tools_and_their_choice_have_the_form_of_chats(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    document = chat(tools=[TOOL], tool_choice=choice)
    assert document["tools"] == [CHAT_TOOL]
    assert {name: document[name] for name in expected} == expected


def test_options_get_the_names_of_chats() -> None:
    schema = {"type": "object", "properties": {}}
    document = chat(
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
    )
    assert document == {
        "messages": HI,
        "max_tokens": 2048,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    }


def test_thinking_is_switched_in_the_template() -> None:
    enabled = chat(thinking={"type": "enabled", "budget_tokens": 1024}, chat_template_kwargs={"a": 1})
    assert enabled["chat_template_kwargs"] == {"enable_thinking": True, "a": 1}
    assert enabled["thinking_token_budget"] == 1024
    assert chat(thinking={"type": "disabled"}, output_config={"effort": "high"})["reasoning_effort"] == "none"
    assert chat(thinking={"type": "adaptive", "display": "omitted"}) == chat()


def test_the_prompt_to_count_is_that_of_the_request() -> None:
    fields = {"messages": HI, "system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = translate_prompt(parse_request(CountTokensRequest, fields)).document
    generated = translate(parse_request(MessagesRequest, {**fields, "max_tokens": 5})).document
    assert generated == {**counted, "max_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "must be an integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", '"assistant"'),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "given 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
            'has type "image"',
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [USE]}]}
                ]
            },
            "messages[0].content[0].content[0].type",
            'has type "tool_use"',
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}, *HI]},
            "messages[0].content[0].input",
            "must be an object",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]", "tool_result"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "runs in Anthropic's server"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "given null"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "name the tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", 'tool_choice "any" needs tools'),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", 'must be "auto", "any", "tool" or "none"'),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens", "at least 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens", "less than max_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", 'must be "json_schema"'),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "output_config.effort must be"),
        ({"stop_sequences": ["a" * 2000]}, "stop_sequences", "1024"),
        ({"maxtokens": 3}, "maxtokens", "max_tokens is"),
    ],
)
def test_a_refusal_names_the_clients_own_field(fields: dict[str, Any], field: str, words: str) -> None:
    error = refusal(**fields)
    assert (error.field, words in str(error)) == (field, True), (error.field, str(error))


def test_only_whole_words_of_a_message_become_the_client_s_own_name() -> None:
    translated = TranslatedChat(document={}, sources=(), names=((r"^stop$", "stop_sequences"),))
    with pytest.raises(RequestError) as refused, translated.own_names():
        raise RequestError("stop[0] and stop are empty; stop_token_ids and nonstop are not", "stop")
    assert str(refused.value) == ("stop_sequences[0] and stop_sequences are empty; stop_token_ids and nonstop are not")
    assert refused.value.field == "stop_sequences"
