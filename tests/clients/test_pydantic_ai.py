"""Pydantic AI: text, output by tools and by JSON schema, a function tool, and the model of Responses."""

from __future__ import annotations

import pytest
from client_shapes import ANSWER, DESCRIBE, MODEL, QUESTION, Folder, Large, Person
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(temperature=0, max_tokens=300, timeout=120.0)


@pytest.fixture(scope="module")
def model(base_url: str) -> Model:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))


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


@pytest.mark.feature("responses")
def test_responses(base_url: str) -> None:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output == ANSWER
