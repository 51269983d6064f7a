"""Types of request fields: whole numbers, lists of token ids, and schemas of fields that pydantic does not check."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rayloom_engine.sampling_params import MAX_STOP_TOKEN_IDS

MAX_DETOKENIZED = 2**20  # the most tokens in a /detokenize request


def whole(value: object) -> object:
    """Returns a number without a fraction, such as 4.0 or 1e2, as int, because JSON Schema counts it as an integer.

    Returns anything else unchanged.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_items(values: object) -> object:
    """Applies `whole` to the items of a list. A list too long for any field is returned unchanged, to save time."""
    if not isinstance(values, list) or len(values) > MAX_DETOKENIZED or float not in set(map(type, values)):
        return values
    return [whole(value) for value in values]


def either(*kinds: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a field whose type pydantic does not check. Every field also allows null."""
    return {"anyOf": [*kinds, {"type": "null"}]}


def list_of(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind}}


LISTS_OF_IDS = {"type": "array", "items": list_of("integer")}
# A message as the OpenAPI document describes it. text/messages.py checks it.
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": either(
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["type", "text"],
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                },
            },
        ),
    },
}
# A function and a tool as the OpenAPI document describes them. tool_fields.py checks them.
FUNCTION: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
FUNCTION_NAME: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": FUNCTION["properties"]["name"]},
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}

Whole = Annotated[int, BeforeValidator(whole)]
# fail_fast: pydantic stops at the first bad element. Without it, pydantic makes an error object for each bad element,
# and a body can hold millions of them.
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True), BeforeValidator(whole_items)]
TokenIds = Annotated[list[int], Field(max_length=MAX_DETOKENIZED, fail_fast=True), BeforeValidator(whole_items)]
