"""The OpenAI Agents SDK on chats and on Responses: text, streams, a forced tool, structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from client_shapes import ANSWER, ASK_TOOL, DESCRIBE, MODEL, QUESTION, Person
from openai import AsyncOpenAI

SETTINGS = ModelSettings(temperature=0, max_tokens=300)
CALLED: list[tuple[str, int]] = []


@function_tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city for some days."""
    CALLED.append((city, days))
    return f"Sunny in {city}."


@pytest.fixture(
    params=[
        pytest.param(OpenAIChatCompletionsModel, id="chat"),
        pytest.param(OpenAIResponsesModel, id="responses", marks=pytest.mark.feature("responses")),
    ]
)
def model(request: pytest.FixtureRequest, base_url: str) -> Callable[[], Model]:
    """Makes a model; each run has an event loop, and a client belongs to one."""
    return lambda: request.param(MODEL, AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0))


@pytest.mark.feature("chat")
def test_text(model: Callable[[], Model]) -> None:
    agent = Agent("a", model=model(), model_settings=SETTINGS)
    assert Runner.run_sync(agent, QUESTION).final_output == ANSWER


@pytest.mark.feature("streaming")
def test_streamed_text(model: Callable[[], Model]) -> None:
    async def run() -> str:
        result = Runner.run_streamed(Agent("a", model=model(), model_settings=SETTINGS), QUESTION)
        async for _event in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == ANSWER


@pytest.mark.feature("tools")
def test_a_forced_tool_is_run(model: Callable[[], Model]) -> None:
    CALLED.clear()
    settings = ModelSettings(temperature=0, max_tokens=300, tool_choice="required")
    agent = Agent("a", model=model(), model_settings=settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
    answer = Runner.run_sync(agent, ASK_TOOL).final_output
    assert CALLED and answer == f"Sunny in {CALLED[0][0]}."


@pytest.mark.feature("structured output")
def test_output_type(model: Callable[[], Model]) -> None:
    agent = Agent("a", model=model(), model_settings=SETTINGS, output_type=Person)
    assert isinstance(Runner.run_sync(agent, DESCRIBE).final_output, Person)
