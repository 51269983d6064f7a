"""Pydantic AI on chats and on Responses: text, a function tool, output by tools and by JSON schema."""

from __future__ import annotations

import pytest
from client_shapes import (
    ANSWER,
    COPY_CALL,
    DESCRIBE,
    MODEL,
    QUESTION,
    Folder,
    Large,
    Person,
)
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(temperature=0, max_tokens=300, timeout=120.0)


@pytest.fixture(
    params=[
        "chat",
        pytest.param("responses", marks=pytest.mark.feature("responses")),
    ]
)
def model(request: pytest.FixtureRequest, base_url: str) -> Model:
    """The model for Messages is left out: pydantic-ai 2.38 cannot make a request with the anthropic client here."""
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
