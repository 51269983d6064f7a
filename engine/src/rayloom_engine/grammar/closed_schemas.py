"""Closes JSON schemas for grammars: an object may have only the keys that its schema declares.

JSON Schema allows any further key where a schema does not mention `additionalProperties`. A model that may invent keys
often does so until max_tokens. The grammars of vLLM (xgrammar) and llama.cpp forbid such keys as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64  # the most schemas inside each other; a deeper schema is returned unchanged
_OF_SCHEMAS = ("properties", "$defs", "definitions")  # their value is an object of schemas
_LISTS = ("anyOf", "oneOf", "prefixItems")  # their value is a list of schemas
_SINGLE = ("items", "additionalProperties")  # their value is a schema or a boolean
# these keywords are left out, because no grammar needs them
_ANNOTATIONS = ("title", "description", "examples", "default", "$comment", "deprecated")
# Each of these keywords applies further schemas to the same value.
_APPLIED = ("$ref", "anyOf", "oneOf")
_NEUTRAL = {
    *_ANNOTATIONS,
    "example",
    "type",
    "$defs",
    "definitions",
    "$schema",
    "discriminator",
    "readOnly",
    "writeOnly",
}
# A schema is closed only if each of its keywords is in this set or begins with x-. Other keywords may require keys that
# `properties` does not declare (dependentRequired), or apply a second schema to one object (allOf). With `not`, a
# schema allows more values if its inner schema allows fewer.
_KNOWN = {
    *_NEUTRAL,
    *_APPLIED,
    *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "const", "enum"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_SCALARS = ("string", "number", "integer", "boolean", "null")  # types of values that have no parts


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `schema` with objects that allow only declared keys. Descriptions are left out.

    `schema` allows every value that the result allows. If `schema` allows at least one value, the result does, too. An
    object stays open if it must have more keys than it declares. The whole schema is returned unchanged if it has a
    keyword that is not in _KNOWN, if several schemas describe one object, or if an object might fit two schemas of a
    `oneOf`.
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
    if not isinstance(properties, Mapping) or "additionalProperties" in schema:
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(key, str) and key in properties for key in required)
        and isinstance(least, int)
        and least <= len(set(required))
    )


def _is_simple(schema: Mapping[str, Any]) -> bool:
    """True if each object is described by only one schema, and no object can fit two schemas of a `oneOf`."""
    level: list[Mapping[str, Any]] = [schema]
    for _ in range(MAX_DEPTH):
        if not all(_is_simple_here(each, schema) for each in level):
            return False
        level = [inner for each in level for inner in _inner_schemas(each)]
        if not level:
            return True
    return False


def _is_simple_here(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Checks the keywords of one schema for `_is_simple`. `root`: the schema with the definitions."""
    if any(name not in _KNOWN and not name.startswith("x-") for name in schema):
        return False
    num_applied = sum(name in schema for name in _APPLIED)
    others = schema.keys() - _NEUTRAL - {name for name in schema if name.startswith("x-")}
    if num_applied and len(others) > 1:
        return False
    if "$ref" in schema and schema["$ref"] != "#" and _target(schema, root) is None:
        return False
    constants = [schema.get("const"), *(schema["enum"] if isinstance(schema.get("enum"), list) else ())]
    if isinstance(schema.get("items"), list) or any(isinstance(value, Mapping | list) for value in constants):
        return False
    return not isinstance(schema.get("oneOf"), list) or _are_disjoint(schema["oneOf"], root)


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
    """True if no object or array fits two branches: a required property has a different constant in each of them."""
    targets = [_target(branch, root) for branch in branches if branch is not False]
    compound = [target for target in targets if not _is_scalar(target)]
    if len(compound) < 2:
        return True
    if not all(isinstance(target, Mapping) and target.get("type") == "object" for target in compound):
        return False
    constants = [_constants(target) for target in compound]
    shared = set(constants[0]).intersection(*constants[1:])
    return any(len({each[name] for each in constants}) == len(constants) for name in shared)


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the root's definition to which a schema refers, else the schema. None if there is no such definition."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if reference is None:
        return schema
    for name in ("$defs", "definitions"):
        definitions = root.get(name)
        key = str(reference).removeprefix(f"#/{name}/")
        if key != reference and isinstance(definitions, Mapping) and key in definitions:
            return definitions[key]
    return None


def _is_scalar(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") in _SCALARS


def _constants(schema: Mapping[str, Any]) -> dict[str, tuple[str, object]]:
    """Returns the kind and value of the constant for each required property with a constant. 1 and 1.0 are equal."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    constants: dict[str, tuple[str, object]] = {}
    for name, inner in properties.items():
        if name not in required or not isinstance(inner, Mapping):
            continue
        values = [inner["const"]] if "const" in inner else inner.get("enum")
        if isinstance(values, list) and len(values) == 1:
            [value] = values
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            constants[name] = ("number", value) if is_number else (type(value).__name__, value)
    return constants
