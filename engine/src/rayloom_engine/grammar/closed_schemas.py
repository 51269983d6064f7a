"""Closes JSON schemas for grammars: an object may have only the keys that its schema declares.

JSON Schema allows any further key where a schema does not mention `additionalProperties`. A model that may invent keys
often does so until max_tokens, and the grammars of vLLM (xgrammar) and llama.cpp forbid such keys as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64  # the most schemas inside each other; a deeper schema is returned unchanged
# An object whose schema has one of these keywords is not closed, because the keyword may need or allow other keys.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "const", "enum")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # their value is an object of schemas
_LISTS = ("anyOf", "oneOf", "prefixItems")  # their value is a list of schemas
_SINGLE = ("items", "additionalProperties")  # their value is a schema
# these keywords are left out, because no grammar needs them
_ANNOTATIONS = ("title", "description", "examples", "default", "$comment", "deprecated")
# Each of these keywords applies further schemas to the same value. If several schemas, or a schema and a list of
# properties, describe one object, each declares only some of its keys.
_APPLIED = ("$ref", "anyOf", "oneOf")
_KEYS = ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
_NEVER = ("allOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies")
_NO_OBJECTS = ("string", "number", "integer", "boolean", "null", "array")  # types of values that have no keys


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `schema` with objects that allow only declared keys. Descriptions are left out.

    Every value that the result allows is allowed by `schema`. An object stays open if a keyword in _OPEN decides about
    its keys, or if it must have more keys than it declares. The whole schema is returned unchanged if several schemas
    describe one object, or if an object might fit two schemas of a `oneOf`.
    """
    return _closed(schema) if _is_simple(schema) else dict(schema)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if _declares_its_keys(schema):
        result["additionalProperties"] = False
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            result[name] = {key: _inner(value) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_inner(value) for value in schema[name]]
    for name in _SINGLE:
        if name in schema:
            result[name] = _inner(schema[name])
    return result


def _inner(value: Any) -> Any:
    return _closed(value) if isinstance(value, Mapping) else value


def _declares_its_keys(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or any(name in schema for name in _OPEN):
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(key, str) and key in properties for key in required)
        and isinstance(least, int)
        and least <= len(properties)
    )


def _is_simple(schema: Mapping[str, Any]) -> bool:
    """True if one schema alone describes each object, and no object can fit two schemas of a `oneOf`."""
    level: list[Mapping[str, Any]] = [schema]
    for _ in range(MAX_DEPTH):
        for each in level:
            num_applied = sum(name in each for name in _APPLIED)
            if any(name in each for name in _NEVER) or num_applied > 1:
                return False
            if num_applied and any(name in each for name in _KEYS):
                return False
            if isinstance(each.get("oneOf"), list) and not _are_disjoint(each["oneOf"], schema):
                return False
        level = [inner for each in level for inner in _inner_schemas(each)]
        if not level:
            return True
    return False


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    values: list[Any] = [schema.get(name) for name in _SINGLE]
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            values += schema[name].values()
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            values += schema[name]
    return (value for value in values if isinstance(value, Mapping))


def _are_disjoint(branches: list[Any], root: Mapping[str, Any]) -> bool:
    """True if no object fits two branches: a required property has a different constant in each of them."""
    objects = [branch for branch in (_target(branch, root) for branch in branches) if _may_be_object(branch)]
    if len(objects) < 2:
        return True
    constants = [_constants(branch) for branch in objects]
    shared = set(constants[0]).intersection(*constants[1:])
    return any(len({each[name] for each in constants}) == len(constants) for name in shared)


def _target(branch: Any, root: Mapping[str, Any]) -> Any:
    """Returns the definition that a branch refers to, or else the branch."""
    reference = branch.get("$ref") if isinstance(branch, Mapping) else None
    if not isinstance(reference, str):
        return branch
    for name in ("$defs", "definitions"):
        definitions = root.get(name)
        key = reference.removeprefix(f"#/{name}/")
        if key != reference and isinstance(definitions, Mapping) and key in definitions:
            return definitions[key]
    return {}


def _may_be_object(branch: Any) -> bool:
    return branch is not False and not (isinstance(branch, Mapping) and branch.get("type") in _NO_OBJECTS)


def _constants(branch: Any) -> dict[str, str]:
    """Returns the JSON text of the constant of each required property that has one."""
    properties = branch.get("properties") if isinstance(branch, Mapping) else None
    required = branch.get("required") if isinstance(branch, Mapping) else None
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    constants = {}
    for name, inner in properties.items():
        if name not in required or not isinstance(inner, Mapping):
            continue
        values = [inner["const"]] if "const" in inner else inner.get("enum")
        if isinstance(values, list) and len(values) == 1:
            constants[name] = json.dumps(values[0], sort_keys=True)
    return constants
