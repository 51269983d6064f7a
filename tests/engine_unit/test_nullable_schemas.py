"""OpenAPI's `nullable` in JSON schemas, in forms and in the parameters of functions."""

from __future__ import annotations

from typing import Any

import pytest

from rayloom_engine.front.openai.fields.tool_fields import tool_use
from rayloom_engine.grammar.nullable_schemas import with_null
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.tool_formats import QWEN3_XML
from rt_forms import accepts
from rt_messages import parsed

NAME = {"type": "string", "minLength": 2}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "nullable": True}, '"a"', "1"),
        ({"type": ["string", "integer"], "nullable": True}, "1", "true"),
        ({"type": "string", "enum": ["a"], "nullable": True}, '"a"', '"b"'),
        ({"const": "a", "nullable": True}, '"a"', '"b"'),
        ({"$ref": "#/$defs/name", "nullable": True, "$defs": {"name": NAME}}, '"ab"', '"a"'),
        ({"anyOf": [NAME, {"type": "integer"}], "nullable": True}, "1", '"a"'),
        ({"allOf": [NAME, {"maxLength": 3}], "nullable": True}, '"abc"', '"abcd"'),
        ({"type": "object", "properties": {"a": {}}, "nullable": True}, '{"a":1}', '{"b":1}'),
    ],
)
def test_null_is_allowed_beside_the_other_values_of_a_nullable_schema(
    schema: dict[str, Any], valid: str, invalid: str
) -> None:
    form = StructuredOutputs(json=schema)
    assert accepts(form, valid)
    assert accepts(form, "null")
    assert not accepts(form, invalid)
    assert not accepts(StructuredOutputs(json=schema | {"nullable": False}), "null")


@pytest.mark.parametrize("place", ["properties", "$defs", "items", "anyOf"])
def test_schemas_inside_a_schema_may_be_nullable(place: str) -> None:
    name = NAME | {"nullable": True}
    schema, text = {
        "properties": ({"type": "object", "properties": {"x": name}, "required": ["x"]}, '{"x":null}'),
        "$defs": ({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": name}}, '["ab",null]'),
        "items": ({"type": "array", "items": name}, '[null,"ab"]'),
        "anyOf": ({"anyOf": [name, {"type": "integer"}]}, "null"),
    }[place]
    assert accepts(StructuredOutputs(json=schema), text)


def test_a_reference_to_an_alternative_of_a_nullable_schema_stays_right() -> None:
    choice = {"description": "A name or a number.", "anyOf": [NAME, {"type": "integer"}], "nullable": True}
    name = {"$ref": "#/properties/a/anyOf/0"}
    schema = {"type": "object", "properties": {"a": choice, "b": name}, "required": ["a", "b"]}
    assert accepts(StructuredOutputs(json=schema), '{"a":null,"b":"ab"}')
    assert not accepts(StructuredOutputs(json=schema), '{"a":1,"b":1}'), "b is a name"


def test_nullable_as_the_name_of_a_property_or_inside_a_value_is_no_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"nullable": {"type": "boolean"}},
        "default": {"nullable": True},
        "examples": [{"nullable": True}],
    }
    assert with_null(schema) == schema


def test_an_object_with_a_nullable_property_still_has_only_declared_keys() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}}
    assert accepts(StructuredOutputs(json=schema), '{"a":null}')
    assert not accepts(StructuredOutputs(json=schema), '{"b":1}')


def test_arguments_of_functions_may_be_nullable_and_the_template_gets_the_function_as_it_was_sent() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "nullable": True}}, "nullable": True}
    function = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    (tool,) = tool_use([function], "auto", None).tools
    assert tool.parameters == {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    assert tool.document == function


def test_a_nullable_argument_with_tags_is_null_or_text() -> None:
    schema = with_null({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}})
    for written, value in (("null", "null"), ("Paris", '"Paris"')):
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert parsed(QWEN3_XML, text, schemas={"f": schema}) == ("", "", [("f", f'{{"a": {value}}}')])
