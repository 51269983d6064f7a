"""instructor: Pydantic models by tools and by JSON schema, whole and in parts, on chats, Responses and Messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from client_shapes import COPIED_CALL, COPY_CALL, DESCRIBE, MODEL, Folder, Large, Person, Place
from pydantic import BaseModel


def created(base_url: str, mode: instructor.Mode, shape: Any, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": DESCRIBE}],
        response_model=shape,
        temperature=0,
        max_tokens=300,
        max_retries=0,
        **fields,
    )


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_json_schema(base_url: str, shape: type[BaseModel]) -> None:
    assert isinstance(created(base_url, instructor.Mode.JSON_SCHEMA, shape), shape)


@pytest.mark.feature("tools")
@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
@pytest.mark.parametrize("shape", [Person, Folder])
def test_tools(base_url: str, mode: instructor.Mode, shape: type[BaseModel]) -> None:
    assert isinstance(created(base_url, mode, shape), shape)


@pytest.mark.feature("streaming")
def test_parts_of_a_shape(base_url: str) -> None:
    # The class Place has no Enum, because instructor's Partial refuses the texts of an Enum.
    *_, last = created(base_url, instructor.Mode.TOOLS, instructor.Partial[Place], stream=True)
    Place.model_validate(last.model_dump())


# instructor names a tool after its class.
class time(BaseModel):
    """The time in a zone."""

    zone: Literal["CET", "UTC"]


class weather(BaseModel):
    """The weather of a city for some days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest.mark.feature("parallel tools")
def test_calls_of_several_tools_that_the_model_may_make(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0)
    made = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": COPY_CALL}],
        response_model=Iterable[weather | time],
        temperature=0,
        max_tokens=64,
        max_retries=0,
    )
    assert [(type(call).__name__, call.model_dump()) for call in made] == [COPIED_CALL]


@pytest.mark.feature("responses")
@pytest.mark.parametrize("shape", [Person, Folder])
def test_responses(base_url: str, shape: type[BaseModel]) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0)
    made = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, input=DESCRIBE, response_model=shape, temperature=0, max_output_tokens=300, max_retries=0
    )
    assert isinstance(made, shape)


@pytest.mark.feature("messages")
@pytest.mark.parametrize("shape", [Person, Folder])
def test_messages(server_url: str, shape: type[BaseModel]) -> None:
    client = anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0, timeout=120.0)
    made = instructor.from_anthropic(client, mode=instructor.Mode.TOOLS).messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": DESCRIBE}],
        response_model=shape,
        max_tokens=300,
        max_retries=0,
        extra_body={"temperature": 0},
    )
    assert isinstance(made, shape)
