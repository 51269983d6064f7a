"""Responses requests become chat requests.

Items become messages, and options get the names of chat requests. Errors name fields as the client's request does.
"""

from __future__ import annotations

from typing import Any

import pytest

from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.extra_fields import EXTRA_NAMES
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ChatRequest
from rayloom_engine.front.responses.request import ResponsesRequest
from rayloom_engine.front.responses.translation import translate

CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}, "strict": True},
}


def chat(**fields: Any) -> dict[str, Any]:
    return translate(parse_request(ResponsesRequest, {"input": "Hi", **fields})).document


def messages(*items: Any) -> list[dict[str, Any]]:
    return chat(input=list(items))["messages"]


def refusal(**fields: Any) -> RequestError:
    """The error of a request, with the field names of this request."""
    with pytest.raises(RequestError) as refused:
        translated = translate(parse_request(ResponsesRequest, {"input": "Hi", **fields}))
        with translated.own_names():
            translated.request().sampling()
    return refused.value


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_a_text_is_a_message_of_the_user_and_instructions_come_first() -> None:
    assert chat(instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_messages_need_no_type_and_their_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    assert messages(
        {"role": "developer", "content": "short"},
        {"role": "user", "content": parts},
        {**said, "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {**said, "content": [{"type": "refusal", "refusal": "no"}]},
    ) == [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    second = {**CALL, "call_id": "c2"}
    said = {"role": "assistant", "content": "I look."}
    assert messages(reasoning("Hm."), said, CALL, second) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        }
    ]


def test_the_output_of_a_call_ends_the_turn() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]}
    assert messages(CALL, output, reasoning("So."), {**CALL, "call_id": "c2"}) == [
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [{**CHAT_CALL, "id": "c2"}]},
    ]


def test_two_messages_or_two_reasonings_are_two_messages() -> None:
    said = {"role": "assistant", "content": "a"}
    assert len(messages(said, said)) == 2
    assert len(messages(reasoning("a"), reasoning("b"))) == 2
    assert len(messages(CALL, said)) == 2, "the model wrote the call first"


def test_a_summary_stands_for_missing_reasoning_text_and_an_empty_item_for_nothing() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    assert messages({"type": "reasoning", "summary": summary})[0]["reasoning_content"] == "short"
    assert messages({"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}) == [
        {"role": "user", "content": "a"}
    ]


def test_tools_and_their_choice_have_the_form_of_chats() -> None:
    named = chat(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False)
    assert named["tools"] == [CHAT_TOOL]
    assert named["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert named["parallel_tool_calls"] is False
    assert chat(tools=[TOOL], tool_choice="required")["tool_choice"] == "required"


def test_only_allowed_tools_are_passed_on() -> None:
    other = {**TOOL, "name": "stop"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    document = chat(tools=[TOOL, other], tool_choice=choice)
    assert (document["tools"], document["tool_choice"]) == ([CHAT_TOOL], "required")
    assert refusal(tools=[other], tool_choice=choice).field == "tool_choice.tools"


def test_the_form_of_the_text_is_a_response_format() -> None:
    schema = {"type": "json_schema", "name": "person", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": schema})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(text={"format": {"type": "text"}, "verbosity": "low"})


def test_options_get_the_names_of_chats() -> None:
    document = chat(
        max_output_tokens=7,
        temperature=0.5,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low", "summary": "auto"},
        seed=3,
    )
    assert document == {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "seed": 3,
    }


def test_fields_that_ask_for_state_or_prices_change_nothing() -> None:
    given = {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "flex", "truncation": "auto"}
    assert chat(**given, include=["reasoning.encrypted_content"], background=False) == chat()


def test_every_field_beyond_openai_is_a_field_of_chats() -> None:
    assert set(EXTRA_NAMES) <= set(ChatRequest.model_fields)
    assert set(EXTRA_NAMES) <= set(ResponsesRequest.model_fields)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "use the earlier items in `input` instead"),
        ({"conversation": "conv_1"}, "conversation", "use the earlier items in `input` instead"),
        ({"background": True}, "background", "use a stream instead or set it to false"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "send the item itself"),
        ({"input": [{"id": "m"}]}, "input[0]", "send the item itself"),
        ({"input": [CALL, {"type": "computer_call"}]}, "input[1].type", '"computer_call" is not supported'),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "must be one of user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            '"input_text" and "output_text"',
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "send the item's"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "must be a string, given {}"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 3}, "input", "given 3"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"web_search" is not supported'),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", '"allowed_tools"'),
        ({"tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, "tool_choice.mode", "given null"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none"}}, "tool_choice.mode", 'given "none"'),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", "at least one"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL, {"type": "mcp", "name": "f"}]}},
            "tool_choice.tools[1]",
            '"mcp"',
        ),
        ({"tool_choice": "maybe"}, "tool_choice", 'given "maybe"'),
        (
            {"text": {"format": {"type": "json_schema", "schema": 3}}},
            "text.format.schema",
            "text.format.schema must be a JSON schema",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", 'given "yaml"'),
        ({"text": {"verbosity": "chatty"}}, "text.verbosity", 'must be "low", "medium" or "high"'),
        ({"text": {"forma": {}}}, "text.forma", "format is"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be"),
        ({"top_logprobs": 2}, "top_logprobs", "in include"),
        ({"top_logprobs": -2, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from -1 to"),
        ({"include": ["everything"]}, "include[0]", 'given "everything"'),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"stream_options": {}}, "stream_options", "only for streams"),
        ({"maxoutput_tokens": 3}, "maxoutput_tokens", "max_output_tokens is"),
    ],
)
def test_a_refusal_names_the_clients_own_field(fields: dict[str, Any], field: str, words: str) -> None:
    error = refusal(**fields)
    assert (error.field, words in str(error)) == (field, True), str(error)
