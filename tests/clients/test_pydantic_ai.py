"""Pydantic AI on chats and on Responses: text, streams, tools, reasoning, output by tools and by JSON schema."""

from __future__ import annotations

from typing import Any

import pytest
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    ASK_TWO_TOOLS,
    COPIED_CALL,
    COPY_CALL,
    DESCRIBE,
    MODEL,
    PARAMETERS,
    QUESTION,
    REASONING,
    THINK,
    TWO_CALLS,
    Folder,
    Large,
    Person,
    check_call,
)
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRequest, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.direct import model_request_stream_sync, model_request_sync
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

SETTINGS = ModelSettings(temperature=0, max_tokens=300, timeout=120.0)
TOOLS = [ToolDefinition(name=name, parameters_json_schema=schema, strict=True) for name, schema in PARAMETERS.items()]


def calls_whole_and_streamed(model: Model, question: str, **settings: Any) -> list[list[tuple[str, dict[str, Any]]]]:
    """Returns the calls of a whole and of a streamed answer. Uses no agent, because an agent cannot force a tool."""
    request: dict[str, Any] = {
        "model_settings": {**SETTINGS, **settings},
        "model_request_parameters": ModelRequestParameters(function_tools=TOOLS),
    }
    messages = [ModelRequest.user_text_prompt(question)]
    whole = model_request_sync(model, messages, **request)
    with model_request_stream_sync(model, messages, **request) as stream:
        list(stream)
        streamed = stream.response
    return [[(call.tool_name, call.args_as_dict()) for call in answer.tool_calls] for answer in (whole, streamed)]


@pytest.fixture(
    params=[
        "chat",
        pytest.param("responses", marks=pytest.mark.feature("responses")),
    ]
)
def model(request: pytest.FixtureRequest, base_url: str) -> Model:
    """A model for chats or for Responses.

    A model for Messages is left out: pydantic-ai 2.38 cannot make a request with the anthropic client here.
    """
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[request.param]
    return kind(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))


@pytest.mark.feature("chat")
def test_text(model: Model) -> None:
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output == ANSWER


@pytest.mark.feature("streaming")
def test_streamed_text(model: Model) -> None:
    with Agent(model, model_settings=SETTINGS).run_stream_sync(QUESTION) as stream:
        assert "".join(stream.stream_text(delta=True)) == ANSWER


@pytest.mark.feature("tools")
@pytest.mark.parametrize("shape", [Person, Folder])
def test_output_by_a_tool(model: Model, shape: type[BaseModel]) -> None:
    agent = Agent(model, output_type=ToolOutput(shape), model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync(DESCRIBE).output, shape)


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_output_by_json_schema(model: Model, shape: type[BaseModel]) -> None:
    agent = Agent(model, output_type=NativeOutput(shape), model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync(DESCRIBE).output, shape)


@pytest.mark.feature("tools")
def test_a_tool_is_run_and_its_result_answered(model: Model) -> None:
    zones: list[str] = []
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def time(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return "It is noon."

    assert agent.run_sync(COPY_CALL).output
    assert zones[0] == "CET"


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["required", ["time"]], ids=["required", "named"])
def test_a_forced_call_whole_and_streamed(model: Model, choice: Any) -> None:
    whole, streamed = calls_whole_and_streamed(model, ASK_TOOL, tool_choice=choice)
    assert whole and streamed == whole
    for name, values in whole:
        check_call(name, values)
        assert choice == "required" or name == "time"


@pytest.mark.feature("tools")
def test_a_call_that_the_model_makes_by_itself_whole_and_streamed(model: Model) -> None:
    assert calls_whole_and_streamed(model, COPY_CALL, tool_choice="auto") == [[COPIED_CALL], [COPIED_CALL]]


@pytest.mark.feature("parallel tools")
def test_two_calls_whole_and_streamed(model: Model) -> None:
    settings: Any = {"tool_choice": "required", "parallel_tool_calls": True}
    assert calls_whole_and_streamed(model, ASK_TWO_TOOLS, **settings) == [TWO_CALLS, TWO_CALLS]


@pytest.mark.feature("reasoning")
def test_the_reasoning_is_a_part_of_its_own(model: Model) -> None:
    settings: Any = {**SETTINGS, "extra_body": {"chat_template_kwargs": THINK}}
    result = Agent(model, model_settings=settings).run_sync(QUESTION)
    [thinking] = [part for part in result.response.parts if isinstance(part, ThinkingPart)]
    # OpenAI's Responses have only a summary of the reasoning, so this client puts the whole text into
    # `provider_details`.
    text = thinking.content or "".join((thinking.provider_details or {})["raw_content"])
    assert (text, result.output) == (REASONING, ANSWER)


@pytest.mark.feature("structured output")
def test_a_streamed_shape_is_the_whole_one(model: Model) -> None:
    agent = Agent(model, output_type=NativeOutput(Person), model_settings=SETTINGS, retries=0)
    with agent.run_stream_sync(DESCRIBE) as stream:
        *_, last = stream.stream_output(debounce_by=None)
    assert last == agent.run_sync(DESCRIBE).output
