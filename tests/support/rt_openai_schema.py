"""Checks answers against OpenAI's published schemas in tests/data/openai-answers.json.

The check corrects the schemas where they differ from OpenAI's servers and documentation. OpenAPI 3.0's `nullable` is
written as JSON Schema. Other corrections allow null for three values: the log-probability of an echoed prompt's first
token, and the finish reason and the usage in a completion's chunks.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "openai-answers.json"
COMPLETION_CHUNK = "completion chunk"  # OpenAI has no separate schema for this object


def check(name: str, document: Any) -> None:
    """Fails with the path and message of every violation of the schema `name`."""
    errors = [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(document)]
    assert not errors, f"{name}: " + "; ".join(errors) + f"\n{json.dumps(document)[:1000]}"


@functools.cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{name}".replace(" ", "_"), "$defs": definitions()})


@functools.cache
def definitions() -> dict[str, Any]:
    """The schemas by name, corrected."""
    schemas = _with_null(json.loads(PUBLISHED.read_text(encoding="utf-8"))["$defs"])
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
    logprobs = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = _or_null(logprobs[name]["items"])
    chunk = copy.deepcopy(schemas["CreateCompletionResponse"])
    properties = chunk["properties"]
    properties["usage"] = _or_null(properties["usage"])
    of_choice = properties["choices"]["items"]["properties"]
    of_choice["finish_reason"] = _or_null(of_choice["finish_reason"])
    schemas[COMPLETION_CHUNK.replace(" ", "_")] = chunk
    return dict(schemas)


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_null(value) for key, value in schema.items() if key != "nullable"}
    return _or_null(plain) if schema.get("nullable") is True else plain


def _or_null(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]}
