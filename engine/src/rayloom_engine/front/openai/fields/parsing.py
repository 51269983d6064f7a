"""Parses a JSON object into a request type. Every field is either used, known to have no effect, or refused by name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.other_apis import NOT_IMPLEMENTED, WITHOUT_EFFECT
from rayloom_engine.front.openai.fields.wire import ENDPOINTS, Wire

MAX_NAMED = 5  # the most unknown fields that a message names
# characters; a longer name is hardly a misspelling, and the search for similar names would take time
MAX_NAME_CHARS = 64

Request = TypeVar("Request", bound=Wire)


def parse_request(model: type[Request], document: dict[str, Any]) -> Request:
    """Converts a JSON object to a request. Raises RequestError that names the first wrong field."""
    check_names(document, model.model_fields, model)
    for name, nested in nested_models(model):
        value = document.get(name)
        if isinstance(value, dict):
            check_names(value, nested.model_fields, nested, f"{name}.")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _request_error(error) from error


@functools.cache  # Cached: to read the annotations of 60 fields takes as long as the rest of the parsing.
def nested_models(model: type[BaseModel]) -> tuple[tuple[str, type[BaseModel]], ...]:
    """Returns the fields whose values are objects with fields of their own."""
    return tuple(
        (name, kind)
        for name, field in model.model_fields.items()
        for kind in get_args(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    )


def check_names(document: dict[str, Any], declared: Iterable[str], model: type[object], prefix: str = "") -> None:
    """Raises RequestError for a field that this request does not have.

    Fields that are known to have no effect are accepted. A field whose value is null is never refused.
    """
    names = set(declared)
    given = [name for name, value in document.items() if value is not None and name not in names]
    unknown = []
    for name in given:
        field = NOT_IMPLEMENTED.get(name)
        if field is None:
            if name not in WITHOUT_EFFECT:
                unknown.append(name)
        elif document[name] not in field.neutral:
            cure = f"use {field.instead} instead" if field.instead else "leave it out"
            if field.neutral:
                cure += f" or set it to {shown(field.neutral[0])}"
            raise RequestError(f"{name} is not supported by this server; {cure}", prefix + name)
    if unknown:
        raise RequestError(_unknown(unknown, names, model, prefix), _cut(prefix + unknown[0]))


def _unknown(unknown: list[str], declared: set[str], model: type[object], prefix: str) -> str:
    sentences = []
    for name in unknown[:MAX_NAMED]:
        sentence = f"{shown(_cut(prefix + name))} is not a field of this request"
        elsewhere = [path for path, other in ENDPOINTS.items() if other is not model and name in other.model_fields]
        near = difflib.get_close_matches(name, declared, n=1, cutoff=0.75) if len(name) <= MAX_NAME_CHARS else []
        if near:
            sentence += f"; {near[0]} is"
        elif elsewhere:
            sentence += f", but of {elsewhere[0]}"
        sentences.append(sentence)
    if len(unknown) > MAX_NAMED:
        sentences.append(f"{len(unknown) - MAX_NAMED} more are not known either")
    return ". ".join(sentences) + ". Leave out fields that this server does not know"


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return RequestError(f"{field} is missing; the request needs it", field)
    if first["type"] == "too_long":
        return RequestError(f"{field} has too many entries, at most {first['ctx']['max_length']} are allowed", field)
    given = shown(first["input"])
    expected = _EXPECTED.get(first["type"])
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"].replace("'", '"')
    if expected is None:
        return RequestError(f"{field}: {first['msg'].lower()}, given {given}", field)
    return RequestError(f"{field} must be {expected}, given {given}", field)


# pydantic's error types, in the words of JSON.
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_pattern_mismatch": "1 to 128 visible ASCII characters",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
