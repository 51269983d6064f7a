"""JSON schemas whose objects are closed for a grammar: an object may have only declared keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rayloom_engine.grammar.closed_schemas import MAX_DEPTH, closed
from rayloom_engine.structured_outputs import StructuredOutputs
from rt_forms import accepts

INNER = {"type": "object", "properties": {"x": {}}}
CLOSED = {**INNER, "additionalProperties": False}


def _kind(name: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


def test_objects_allow_only_declared_keys() -> None:
    schema = {
        "title": "x",
        "properties": {"a": {**INNER, "description": "x"}, "title": {"anyOf": [INNER, {"type": "null"}]}},
        "$defs": {"d": INNER},
    }
    assert closed(schema) == {
        "properties": {"a": CLOSED, "title": {"anyOf": [CLOSED, {"type": "null"}]}},
        "$defs": {"d": CLOSED},
        "additionalProperties": False,
    }
    assert closed({"type": "array", "items": INNER}) == {"type": "array", "items": CLOSED}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "patternProperties": {"^x": {"type": "integer"}}},
        {"properties": {"a": {}}, "required": ["b"]},  # needs a key that it does not declare
        {"properties": {"a": {}}, "minProperties": 2},
        {"type": "object", "properties": {"a": False}, "minProperties": 1},
        {"properties": {"a": {}}, "const": {"b": 1}},
        {"anyOf": [INNER, {"type": "null"}], "enum": [{"y": 1}]},
        {"$ref": "#/$defs/d", "$defs": {"d": INNER}, "const": {"y": 1}},
        {"$ref": "#/$defs/d", "items": INNER, "$defs": {"d": {"type": "array", "items": CLOSED}}},
        {"type": "array", "items": [{"$ref": "#/definitions/d"}], "definitions": {"d": INNER}},
        {"properties": {"ab": INNER}, "patternProperties": {"^a": INNER}, "additionalProperties": False},
        {"$ref": "#/components/d", "components": {"d": {"allOf": [INNER, INNER]}}},
        {"properties": {"x": {"$ref": "#/properties/y/default"}, "y": {"default": INNER}}},
        {"oneOf": [{"type": "array", "items": INNER}, {"type": "array", "items": {**INNER, "minProperties": 0}}]},
        {"properties": {"a": INNER}, "allOf": [{"properties": {}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"required": ["c"]}]},
        {"$ref": "#/$defs/d", "properties": {"a": {}}, "$defs": {"d": INNER}},
        {"oneOf": [INNER, {"type": "object", "properties": {"x": {}, "y": {}}}]},  # {"x": 1} fits both
        {"items": {"oneOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/no"}]}, "$defs": {"d": INNER}},
    ],
)
def test_a_schema_that_does_not_list_the_keys_of_its_objects_is_returned_unchanged(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_alternatives_that_a_constant_tells_apart_are_closed() -> None:
    branches = [{"$ref": "#/$defs/a"}, _kind("b"), {"type": "string"}]
    made = closed({"oneOf": branches, "$defs": {"a": _kind("a")}})
    assert made["oneOf"][1] == {**_kind("b"), "additionalProperties": False}
    assert made["$defs"]["a"] == {**_kind("a"), "additionalProperties": False}
    for same in ({"oneOf": [_kind("a"), _kind("a")]}, {"oneOf": [_kind(1), _kind(1.0)]}):
        assert closed(same) == same
    assert closed({"oneOf": [_kind(1), _kind(True)]})["oneOf"][0]["additionalProperties"] is False


def test_a_schema_deeper_than_the_limit_is_returned_unchanged() -> None:
    schema: dict[str, Any] = INNER
    for _ in range(MAX_DEPTH - 1):  # INNER has two levels
        schema = {"items": schema}
    assert closed(schema) == schema
    assert closed(schema["items"]) != schema["items"]


def test_the_grammar_of_a_schema_has_no_further_keys_unless_the_schema_allows_them() -> None:
    assert accepts(StructuredOutputs(json=INNER), '{"x":1}')
    assert not accepts(StructuredOutputs(json=INNER), '{"x":1,"y":2}')
    assert accepts(StructuredOutputs(json={**INNER, "additionalProperties": True}), '{"x":1,"y":2}')
    assert accepts(StructuredOutputs(json={"type": "object"}), '{"y":2}')


def _values(depth: int) -> Iterator[Any]:
    """All values of this depth: 1, "x", objects whose keys are among a and b, and lists of one value."""
    yield from (1, "x")
    if depth == 0:
        return
    inner = [None, *_values(depth - 1)]
    for a, b in itertools.product(inner, inner):
        yield {key: value for key, value in (("a", a), ("b", b)) if value is not None}
    yield from ([value] for value in _values(depth - 1))


VALUES = list(_values(2))
KEYS = st.lists(st.sampled_from("ab"), unique=True)
LEAVES = st.sampled_from(
    [{}, {"type": "integer"}, {"type": "object"}, {"const": "x"}, {"const": {"a": 1}}, {"$ref": "#/$defs/d"}]
)


def _compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.lists(inner, min_size=1, max_size=2)
    keys = st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("ab"), inner)},
        optional={
            "required": KEYS,
            "minProperties": st.integers(0, 2),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
            "description": st.just("words"),
        },
    )
    array = st.fixed_dictionaries({"items": inner}, optional={"minItems": st.integers(0, 1)})
    lists = st.sampled_from(["anyOf", "oneOf", "allOf"])
    alternatives = st.builds(lambda name, schemas: {name: schemas}, lists, pairs)
    parts = keys | alternatives | array | st.sampled_from([{"enum": [{"a": 1}, 1]}, {"$ref": "#/$defs/d"}])
    return parts | st.builds(lambda one, other: {**one, **other}, parts, parts)


SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_a_closed_schema_allows_fewer_values_and_never_none(schema: dict[str, Any], definition: dict[str, Any]) -> None:
    if "$ref" in definition:
        return  # a definition that is a reference to itself
    schema = {**schema, "$defs": {"d": definition}}
    both = (Draft202012Validator(schema), Draft202012Validator(closed(schema)))
    try:
        allowed, still = ([value for value in VALUES if each.is_valid(value)] for each in both)
    except RecursionError:  # a definition that applies itself to the same value
        return
    assert all(value in allowed for value in still)
    assert bool(still) == bool(allowed)
