"""Values of arguments that a model writes as plain text, converted by the function's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPE_NAMES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (dict, ("object",)),
    (list, ("array",)),
    (type(None), ("null",)),
)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "$comment")  # these change no value
# A string with one of these keywords is written as JSON, because the grammar of forced calls enforces them in JSON.
_LIMITS = ("const", "pattern", "format", "anyOf", "oneOf", "allOf", "$ref")


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the definition in `root` to which `schema` only refers; `schema` itself if it does anything else."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or any(key not in _ANNOTATIONS for key in schema if key != "$ref"):
        return schema
    for name in ("$defs", "definitions"):
        definitions = root.get(name)
        if isinstance(definitions, Mapping) and reference.startswith(f"#/{name}/"):
            found = definitions.get(reference.removeprefix(f"#/{name}/"))
            return found if isinstance(found, Mapping) else schema
    return schema


def is_text(schema: Mapping[str, Any]) -> bool:
    """True if the model writes each value as plain text without quotes: as any text, or as a word of an `enum`."""
    words = schema.get("enum")
    has_words = isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)
    return _types(schema) == {"string"} and (words is None or has_words) and not any(key in schema for key in _LIMITS)


def converted(text: str, schema: Mapping[str, Any]) -> Any:
    """Returns the value of `text` in a type that the schema allows. A string is the last choice.

    A string may be written with or without the quotes of JSON. If `text` is no value of these types, returns `text`
    itself: the client then sees what the model wrote.
    """
    types = _types(schema)
    value = _parsed(text.strip())
    if isinstance(value, str):
        is_quoted = value != text.strip()
        return value if is_quoted and (not types or "string" in types) else text
    names = next(names for kind, names in _TYPE_NAMES if type(value) is kind)
    if types.intersection(names):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    return value if not types else text


def _parsed(text: str) -> Any:
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        value = json.loads(text, parse_constant=_refused)
        json.dumps(value, allow_nan=False)  # raises ValueError for numbers beyond a float, such as 1e999
        return value
    except (ValueError, RecursionError):
        return text


def _refused(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the names of the types that `schema` allows.

    Returns no names if the schema allows all types, or limits them by keywords that are not read here.
    """
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            types = [_types(option) for option in options if isinstance(option, Mapping)]
            return set().union(*types) if all(types) else set()
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()
