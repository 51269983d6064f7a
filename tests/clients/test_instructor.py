"""instructor: Pydantic models by tools and by JSON schema, whole and in parts."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from client_shapes import DESCRIBE, MODEL, Folder, Large, Person, Place
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
    # Without an Enum: instructor's Partial refuses the texts of one.
    *_, last = created(base_url, instructor.Mode.TOOLS, instructor.Partial[Place], stream=True)
    Place.model_validate(last.model_dump())
