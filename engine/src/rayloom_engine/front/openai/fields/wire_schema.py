"""Completes the JSON schemas of requests: ranges and defaults that pydantic does not check, fields without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

from rayloom_engine.front.openai.fields.other_apis import NOT_IMPLEMENTED, WITHOUT_EFFECT
from rayloom_engine.sampling_params import RANGES, SamplingParams

NO_EFFECT = "x-no-effect"
# Fields that are settings of SamplingParams under another name.
RANGE_OF = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def complete_schema(schema: dict[str, Any], model: type[Any]) -> None:
    """Completes the schema of a request in place. The minimum of max_tokens is `model.least_tokens`."""
    schema["additionalProperties"] = False
    properties = schema["properties"]
    for name, field in properties.items():
        _complete_field(name, field)
        if name in ("max_tokens", "max_completion_tokens"):
            for part in field.get("anyOf", [field]):
                if "minimum" in part:
                    part["minimum"] = model.least_tokens
    for unused in WITHOUT_EFFECT.values():
        properties.setdefault(unused.name, {"description": f"No effect: {unused.reason}.", NO_EFFECT: True})


def extensions() -> dict[str, Any]:
    """Returns the document's own keys: the fields that have no effect, and the fields that are refused."""
    return {
        "x-fields-without-effect": [dataclasses.asdict(field) for field in WITHOUT_EFFECT.values()],
        "x-refused-fields": [
            {**dataclasses.asdict(field), "neutral": list(field.neutral)} for field in NOT_IMPLEMENTED.values()
        ],
    }


def _complete_field(name: str, field: dict[str, Any]) -> None:
    allowed = RANGES.get(RANGE_OF.get(name, name))
    for part in field.get("anyOf", [field]):
        if allowed is not None and part.get("type") in ("integer", "number"):
            part["minimum"] = allowed.low
            if allowed.high is not None:
                part["maximum"] = allowed.high
    default = _DEFAULTS.get(name)
    says_default = field.get("default") is not None or "Default: " in field.get("description", "")
    if isinstance(default, int | float) and not says_default:
        field["default"] = default
