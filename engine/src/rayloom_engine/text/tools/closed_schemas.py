"""JSON schemas of arguments, prepared for a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_OF_SCHEMAS = ("properties", "$defs", "definitions")  # keywords whose value is an object of schemas
_LISTS = ("anyOf", "oneOf", "prefixItems")  # keywords whose value is a list of schemas
_SINGLE = ("items", "additionalProperties")  # keywords whose value is a schema
# these keywords are left out, because no grammar needs them
_ANNOTATIONS = ("title", "description", "examples", "default", "$comment", "deprecated")
MAX_DEPTH = 64  # the most objects and lists inside each other; a deeper schema is returned unchanged


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `schema` with objects that allow only declared keys, unless a keyword in _OPEN decides about other keys.

    Descriptions are left out. Every value that the result allows is allowed by `schema`. A schema with `allOf` is
    returned unchanged, because each schema in `allOf` declares only some of the keys.
    """
    return dict(schema) if _has_all_of(schema, 0) else _closed(schema, 0)


def _closed(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        return dict(schema)
    result = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if isinstance(schema.get("properties"), Mapping) and not any(name in schema for name in _OPEN):
        result["additionalProperties"] = False
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            result[name] = {key: _inner(value, depth) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_inner(value, depth) for value in schema[name]]
    for name in _SINGLE:
        if name in schema:
            result[name] = _inner(schema[name], depth)
    return result


def _inner(value: Any, depth: int) -> Any:
    return _closed(value, depth + 1) if isinstance(value, Mapping) else value


def _has_all_of(value: Any, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return True
    if isinstance(value, Mapping):
        return "allOf" in value or any(_has_all_of(item, depth + 1) for item in value.values())
    return isinstance(value, list) and any(_has_all_of(item, depth + 1) for item in value)
