"""Shapes of answers: nested, recursive, with enums, and one whose JSON schema has 15 KB. Each shape limits the length
of its texts.

The model is too small to follow a schema by itself. So an answer has the shape only if the server enforces the schema.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

MODEL = "smollm2"
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."
# With these variables chat_template.jinja shows the model two answers with reasoning, and opens the reasoning.
THINK = {"enable_thinking": True}
REASONING = "They ask for the capital of France."
REASONING_TOKENS = 12  # with both tags
# The question contains the JSON of a folder without subfolders. The model copies this JSON, so the recursion of Folder
# ends.
DESCRIBE = 'Copy this JSON, or describe a person as JSON: {"name": "etc", "folders": []}'

Word = Annotated[str, Field(max_length=12)]


class Colour(StrEnum):
    red = "red"
    green = "green"
    blue = "blue"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Word
    size: Literal["village", "town", "city"]


class Person(BaseModel):
    """A person with a home: nested, with enums."""

    model_config = ConfigDict(extra="forbid")

    name: Word
    age: Annotated[int, Field(ge=0, le=120)]
    colour: Colour
    home: Place


class Folder(BaseModel):
    """A folder with folders inside."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["etc", "usr", "var"]
    folders: Annotated[list[Folder], Field(max_length=1)]


def _large_shape() -> type[BaseModel]:
    """A class with 8 fields, each of which allows 80 long words."""
    fields: dict[str, Any] = {}
    for number in range(8):
        words = tuple(f"word-{number}-{each:03d}-{'x' * 8}" for each in range(80))
        fields[f"choice_{number}"] = (Literal[words], ...)
    return create_model("Large", __config__=ConfigDict(extra="forbid"), **fields)


Large = _large_shape()
LARGE_BYTES = len(json.dumps(Large.model_json_schema()))

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME_PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
# The tools of a chat, in the format of OpenAI's API.
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": parameters, "strict": True}}
    for name, text, parameters in (
        ("weather", "The weather of a city for some days.", WEATHER_PARAMETERS),
        ("time", "The time in a zone.", TIME_PARAMETERS),
    )
]
PARAMETERS = {"weather": WEATHER_PARAMETERS, "time": TIME_PARAMETERS}
ASK_TOOL = "How is the weather in Paris for 3 days?"
ASK_TWO_TOOLS = "How is the weather in Paris for 3 days, and what is the time in CET?"
TWO_CALLS = [("weather", {"city": "Paris", "days": 3}), ("time", {"zone": "CET"})]
# The model copies the call, although nothing forces it to call a tool.
COPY_CALL = 'Repeat this text:\n<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
COPIED_CALL = ("time", {"zone": "CET"})


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """Fails unless a call names a tool of TOOLS and its arguments have the tool's shape."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    properties = PARAMETERS[name]["properties"]
    assert set(values) == set(properties)
    for key, value in values.items():
        allowed = properties[key].get("enum")
        assert value in allowed if allowed else isinstance(value, int) and value <= 9
