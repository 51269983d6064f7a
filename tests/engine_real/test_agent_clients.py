"""The official `openai` client with Responses, and the official `anthropic` client, against the real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import httpx
import pydantic
import pytest

from rt_lazy import LazyModule
from rt_message_events import read_messages_stream
from rt_response_events import item_text, read_responses_stream
from rt_server import RunningServer

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic = LazyModule("anthropic")
    openai = LazyModule("openai")

API_KEY = "key-for-tests"  # the key that conftest.py writes into the server's key file
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."
CITIES = ["Paris", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}  # sent as an extra field: the anthropic client has no such parameter


@pytest.fixture
def responses(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key=API_KEY, max_retries=0, timeout=120.0) as made:
        yield made


@pytest.fixture
def messages(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.api_url, api_key=API_KEY, max_retries=0, timeout=120.0) as made:
        yield made


def test_a_response(responses: openai.OpenAI) -> None:
    answer = responses.responses.create(model=MODEL, input=QUESTION, temperature=0, store=False)
    assert (answer.output_text, answer.status) == (ANSWER, "completed")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (42, 8)


def test_a_streamed_response_has_the_text_of_the_whole_one(responses: openai.OpenAI) -> None:
    with responses.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == ANSWER
    assert len(deltas) > 1


def test_a_conversation_continues_with_the_items_of_the_answer(responses: openai.OpenAI) -> None:
    first = responses.responses.create(model=MODEL, input=QUESTION, temperature=0)
    items = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And of Italy?"}]
    second = responses.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=30)
    assert "Italy" in second.output_text


def test_the_log_probabilities_of_a_response(responses: openai.OpenAI) -> None:
    answer = responses.responses.create(
        model=MODEL, input=QUESTION, temperature=0, include=["message.output_text.logprobs"], top_logprobs=2
    )
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == ANSWER + "<|im_end|>"
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in entries)


def test_refusals_of_responses_are_the_clients_own_error_classes(responses: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as stateful:
        responses.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
    assert stateful.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        responses.responses.create(model="gpt-4", input="Hi")
    with pytest.raises(openai.BadRequestError) as tool:
        responses.responses.create(model=MODEL, input="Hi", tools=[{"type": "web_search"}])
    assert tool.value.param == "tools[0].type"


def test_a_call_that_is_forced_and_its_output(responses: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = responses.responses.create(
        model=MODEL, input=items, tools=[tool], tool_choice={"type": "function", "name": "get_weather"}, temperature=0
    )
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "get_weather")]
    call = answer.output[0]
    assert json.loads(call.arguments)["city"] in CITIES
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = responses.responses.create(model=MODEL, input=items, tools=[tool], temperature=0, max_output_tokens=20)
    assert second.output_text


def test_a_call_that_is_forced_is_streamed(responses: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    given = {"model": MODEL, "input": "Paris?", "tools": [tool], "tool_choice": "required", "temperature": 0}
    with responses.responses.stream(**given, parallel_tool_calls=False) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = stream.get_final_response().output[0]
    assert (call.type, call.arguments) == ("function_call", "".join(pieces))
    assert json.loads(call.arguments)["city"] in CITIES


def test_a_form_of_a_response(responses: openai.OpenAI) -> None:
    class Capital(pydantic.BaseModel):
        name: Literal["Paris", "Rome"]
        is_large: bool

    answer = responses.responses.parse(model=MODEL, input=QUESTION, text_format=Capital, temperature=0)
    assert isinstance(answer.output_parsed, Capital)


def test_a_message(messages: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": QUESTION}]
    answer = messages.messages.create(model=MODEL, max_tokens=30, messages=question, extra_body=GREEDY)
    assert [block.text for block in answer.content] == [ANSWER]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 8)
    counted = messages.messages.count_tokens(model=MODEL, messages=question)
    assert counted.input_tokens == 42


def test_a_streamed_message_has_the_text_of_the_whole_one(messages: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": QUESTION}]
    with messages.messages.stream(model=MODEL, max_tokens=30, messages=question, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == ANSWER
    assert len(pieces) > 1
    assert final.usage.output_tokens == 8


def test_a_stop_sequence_and_the_limit_end_a_message(messages: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": QUESTION}]
    stopped = messages.messages.create(
        model=MODEL, max_tokens=30, messages=question, extra_body=GREEDY, stop_sequences=[" France"]
    )
    assert (stopped.content[0].text, stopped.stop_reason) == ("The capital of", "stop_sequence")
    assert stopped.stop_sequence == " France"
    cut = messages.messages.create(model=MODEL, max_tokens=3, messages=question, extra_body=GREEDY)
    assert (cut.content[0].text, cut.stop_reason) == ("The capital of", "max_tokens")


def test_a_message_continues_the_assistants_beginning(messages: anthropic.Anthropic) -> None:
    answer = messages.messages.create(
        model=MODEL,
        max_tokens=30,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital of"}],
    )
    assert answer.content[0].text == " France is Paris."


def test_the_second_request_reads_its_prompt_from_the_cache(messages: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": "Cache coverage sentinel. " * 40 + "Answer with one word."}]
    cold, warm = (messages.messages.create(model=MODEL, max_tokens=1, messages=question).usage for _ in range(2))
    assert cold.cache_creation_input_tokens and cold.cache_creation_input_tokens % 16 == 0, "whole blocks"
    assert warm.cache_read_input_tokens and warm.cache_read_input_tokens > cold.cache_read_input_tokens


def test_a_tool_that_must_be_used_and_its_result(messages: anthropic.Anthropic) -> None:
    tool = {"name": "get_weather", "input_schema": SCHEMA, "strict": True}
    talk = [{"role": "user", "content": "What is the weather in Paris?"}]
    given = {"model": MODEL, "max_tokens": 60, "tools": [tool], "extra_body": GREEDY}
    choice = {"type": "tool", "name": "get_weather"}
    with messages.messages.stream(messages=talk, tool_choice=choice, **given) as stream:
        answer = stream.get_final_message()
    assert [(block.type, block.name) for block in answer.content] == [("tool_use", "get_weather")]
    assert answer.content[0].input["city"] in CITIES
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "sunny"}
    talk += [answer.to_param(), {"role": "user", "content": [result]}]
    assert messages.messages.create(messages=talk, **given).content


def test_a_form_of_a_message(messages: anthropic.Anthropic) -> None:
    answer = messages.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": QUESTION}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_body=GREEDY,
    )
    assert json.loads(answer.content[0].text)["city"] in CITIES


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seeded_streams_equal_whole_answers_on_both_apis(server: RunningServer, seed: int) -> None:
    sampling = {"temperature": 1.0, "seed": seed, "stream": True}
    with httpx.Client(base_url=server.api_url, headers={"x-api-key": API_KEY}, timeout=120.0) as http:
        body = {"input": "Tell me a story.", "max_output_tokens": 24, **sampling}
        streamed = read_responses_stream(http.post("/v1/responses", json=body))
        whole = http.post("/v1/responses", json={**body, "stream": False}).json()
        messages = [{"role": "user", "content": "Tell me a story."}]
        body = {"messages": messages, "max_tokens": 24, **sampling}
        message = read_messages_stream(http.post("/v1/messages", json=body)).message
        whole_message = http.post("/v1/messages", json={**body, "stream": False}).json()
    text = item_text(whole["output"][0])
    assert [item.text for item in streamed.items] == [text]
    assert message["content"] == whole_message["content"]
    assert message["content"][0]["text"] == text, "the same prompt, seed and limit"
