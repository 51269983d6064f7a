"""The OpenAI Agents SDK on chats and on Responses: text, streams, tools, reasoning, structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

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
from agents.items import ReasoningItem
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    ASK_TWO_TOOLS,
    COPIED_CALL,
    COPY_CALL,
    DESCRIBE,
    MODEL,
    QUESTION,
    REASONING,
    THINK,
    TWO_CALLS,
    Folder,
    Large,
    Person,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

SETTINGS = ModelSettings(temperature=0, max_tokens=300)
CALLED: list[tuple[str, dict[str, Any]]] = []


@function_tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city for some days."""
    CALLED.append(("weather", {"city": city, "days": days}))
    return f"Sunny in {city}."


@function_tool
def time(zone: Literal["CET", "UTC"]) -> str:
    """The time in a zone."""
    CALLED.append(("time", {"zone": zone}))
    return f"Noon in {zone}."


def run_with_tools(
    model: Model, question: str, *, is_streamed: bool, **settings: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the calls that the SDK has run. The run ends after the first answer with calls."""
    CALLED.clear()
    agent = Agent(
        "a",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=300, **settings),
        tools=[weather, time],
        tool_use_behavior="stop_on_first_tool",
    )

    async def stream() -> None:
        async for _event in Runner.run_streamed(agent, question).stream_events():
            pass

    if is_streamed:
        asyncio.run(stream())
    else:
        Runner.run_sync(agent, question)
    return sorted(CALLED, key=lambda call: call[0], reverse=True)  # the SDK runs tools at the same time


@pytest.fixture(
    params=[
        pytest.param(OpenAIChatCompletionsModel, id="chat"),
        pytest.param(OpenAIResponsesModel, id="responses", marks=pytest.mark.feature("responses")),
    ]
)
def model(request: pytest.FixtureRequest, base_url: str) -> Callable[[], Model]:
    """Makes a new model for each run, because each run has its own event loop, and a client belongs to one loop."""
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
@pytest.mark.parametrize("choice", ["required", "time"])
def test_a_forced_tool_is_run_whole_and_streamed(model: Callable[[], Model], choice: str) -> None:
    whole, streamed = (
        run_with_tools(model(), ASK_TOOL, is_streamed=is_streamed, tool_choice=choice) for is_streamed in (False, True)
    )
    assert whole and streamed == whole
    assert choice == "required" or {name for name, _ in whole} == {"time"}


@pytest.mark.feature("tools")
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_that_the_model_calls_by_itself_is_run(model: Callable[[], Model], is_streamed: bool) -> None:
    assert run_with_tools(model(), COPY_CALL, is_streamed=is_streamed, tool_choice="auto") == [COPIED_CALL]


@pytest.mark.feature("parallel tools")
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_two_tools_are_run(model: Callable[[], Model], is_streamed: bool) -> None:
    settings: Any = {"tool_choice": "required", "parallel_tool_calls": True}
    assert run_with_tools(model(), ASK_TWO_TOOLS, is_streamed=is_streamed, **settings) == TWO_CALLS


@pytest.mark.feature("tools")
def test_the_result_of_a_tool_is_answered(model: Callable[[], Model]) -> None:
    CALLED.clear()
    agent = Agent("a", model=model(), model_settings=SETTINGS, tools=[weather, time])
    assert Runner.run_sync(agent, COPY_CALL, max_turns=4).final_output
    assert CALLED[0] == COPIED_CALL


@pytest.mark.feature("reasoning")
def test_the_reasoning_is_an_item_of_its_own(model: Callable[[], Model]) -> None:
    settings = ModelSettings(temperature=0, max_tokens=300, extra_body={"chat_template_kwargs": THINK})
    result = Runner.run_sync(Agent("a", model=model(), model_settings=settings), QUESTION)
    [item] = [item.raw_item for item in result.new_items if isinstance(item, ReasoningItem)]
    assert "".join(part.text for part in item.content or item.summary) == REASONING
    assert result.final_output == ANSWER


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_output_type(model: Callable[[], Model], shape: type[BaseModel]) -> None:
    agent = Agent("a", model=model(), model_settings=SETTINGS, output_type=shape)
    assert isinstance(Runner.run_sync(agent, DESCRIBE).final_output, shape)
