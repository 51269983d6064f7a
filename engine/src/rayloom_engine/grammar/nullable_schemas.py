"""Translates OpenAPI's `nullable: true` into JSON Schema, which has no such keyword.

Grammar libraries ignore keywords that JSON Schema does not have. So without the translation, null would never be
allowed, although the schema asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
# Beside these keywords, null has to be an alternative to the rest of the schema.
_APPLIED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
_OF_THE_ROOT = ("$defs", "definitions", "$schema", "$id", "x-guidance")  # these count only in the outermost schema
_ANNOTATIONS = ("title", "description", "default", "example", "examples", "deprecated")  # these change no value
_NULL = {"type": "null"}


def with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `schema` without `nullable`. Where it is true, the result allows null, beside an `enum` as well.

    A `nullable` that is no boolean stays.
    """
    result = dict(schema)
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            result[name] = {key: _inner(value) for key, value in schema[name].items()}
    for name in _SINGLE:
        if name in schema:
            result[name] = _inner(schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_inner(value) for value in schema[name]]
    if not isinstance(schema.get("nullable"), bool):
        return result
    return _or_null(result) if result.pop("nullable") else result


def _inner(value: Any) -> Any:
    return with_null(value) if isinstance(value, Mapping) else value


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if _is_choice(schema):
        # A `$ref` may point to one of the alternatives, so their paths stay.
        return schema | {"anyOf": [*schema["anyOf"], _NULL]}
    if any(name in schema for name in _APPLIED):
        rest = {name: value for name, value in schema.items() if name not in _OF_THE_ROOT}
        return {name: schema[name] for name in _OF_THE_ROOT if name in schema} | {"anyOf": [rest, _NULL]}
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if isinstance(types, list) and "null" not in types:
        schema["type"] = [*types, "null"]
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    values = schema.get("enum")
    if isinstance(values, list) and None not in values:
        schema["enum"] = [*values, None]
    return schema


def _is_choice(schema: dict[str, Any]) -> bool:
    """True if `anyOf` is the only keyword that limits the values."""
    return isinstance(schema.get("anyOf"), list) and schema.keys() <= {"anyOf", *_OF_THE_ROOT, *_ANNOTATIONS}
