"""FormFields: the fields that ask for a form of the answer, in the words of OpenAI and of other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field
from pydantic.config import JsonDict

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.structured_outputs import StructuredOutputs

_OBJECT_OR_TEXT: JsonDict = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}, {"type": "null"}]}
_KINDS = ("text", "json_object", "json_schema")
# Keys of structured_outputs. Supported keys have (). Other keys have the values that are accepted without an effect.
_VLLM_KEYS: dict[str, tuple[object, ...]] = {
    "json": (),
    "json_object": (),
    "regex": (),
    "choice": (),
    "grammar": (),
    "disable_fallback": (None, False, True),  # llguidance is this server's only backend
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}


class FormFields(BaseModel):
    """At most one of these fields may ask for a form."""

    response_format: dict[str, Any] | None = Field(
        None,
        description='An object with type: "text"; "json_object", any JSON object, or with `schema` JSON of that '
        'schema, as in llama.cpp; "json_schema" with `json_schema`, an object with name, schema and strict. A keyword '
        "of the schema that cannot be enforced is refused; if strict is false, the keyword is ignored and named in "
        "`warnings`, beside `usage`.",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="An object with exactly one of json (a JSON schema), json_object (true), regex, choice (a list of "
        "texts) and grammar (GBNF or Lark).",
    )
    guided_json: Any = Field(None, description="Same as json in structured_outputs.", json_schema_extra=_OBJECT_OR_TEXT)
    guided_regex: str | None = Field(None, description="Same as regex in structured_outputs.")
    guided_choice: list[Any] | None = Field(None, description="Same as choice in structured_outputs.")
    guided_grammar: str | None = Field(None, description="Same as grammar in structured_outputs.")
    regex: str | None = Field(None, description="SGLang's name of regex in structured_outputs.")
    ebnf: str | None = Field(None, description="SGLang's name of grammar in structured_outputs.")
    grammar: str | None = Field(None, description="llama.cpp's name of grammar in structured_outputs.")
    json_schema: Any = Field(
        None, description="A JSON schema, as an object or as its text.", json_schema_extra=_OBJECT_OR_TEXT
    )
    format: Any = Field(
        None, description='Ollama\'s field: "json", or a JSON schema.', json_schema_extra=_OBJECT_OR_TEXT
    )

    def form(self) -> StructuredOutputs | None:
        """Returns the form of the answer; None if any text is allowed. Raises RequestError that names the field."""
        forms = [form for name, read in _READERS.items() if (form := read(name, getattr(self, name))) is not None]
        if len(forms) > 1:
            raise RequestError(
                f"{forms[0].field} and {forms[1].field} each ask for a form of the answer; leave one out",
                forms[1].field,
            )
        return forms[0] if forms else None


def _response_format(name: str, value: Mapping[str, Any] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind not in _KINDS:
        words = ", ".join(f'"{word}"' for word in _KINDS)
        raise RequestError(f"{name}.type must be one of {words}, given {shown(kind)}", f"{name}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        if schema is None:
            return StructuredOutputs(json_object=True, field=name)
        return StructuredOutputs(json=_checked_schema(f"{name}.schema", schema), field=f"{name}.schema")
    field = f"{name}.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise RequestError(f"{field} must be an object with name and schema, given {shown(described)}", field)
    schema = _checked_schema(f"{field}.schema", described.get("schema"))
    strict = described.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{field}.strict must be true or false, given {shown(strict)}", f"{field}.strict")
    return StructuredOutputs(json=schema, is_lenient=strict is False, field=f"{field}.schema")


def _checked_schema(field: str, schema: object) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise RequestError(f"{field} must be a JSON schema, an object, given {shown(schema)}", field)
    return schema


def _structured_outputs(name: str, value: Mapping[str, Any] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    given: dict[str, Any] = {}
    for key, item in value.items():
        neutral = _VLLM_KEYS.get(key)
        if neutral is None:
            raise RequestError(f"{name}.{key[:64]} is not a field of this request; leave it out", f"{name}.{key[:64]}")
        if neutral == ():
            given[key] = item
        elif item not in neutral:
            raise RequestError(f"{name}.{key} is not supported by this server; leave it out", f"{name}.{key}")
    return StructuredOutputs(**given, field=name)


def _schema(name: str, value: object) -> StructuredOutputs | None:
    return None if value is None else StructuredOutputs(json=value, field=name)  # type: ignore[arg-type]


def _regex(name: str, value: str | None) -> StructuredOutputs | None:
    return None if value is None else StructuredOutputs(regex=value, field=name)


def _choice(name: str, value: list[str] | None) -> StructuredOutputs | None:
    return None if value is None else StructuredOutputs(choice=value, field=name)


def _grammar(name: str, value: str | None) -> StructuredOutputs | None:
    return StructuredOutputs(grammar=value, field=name) if value else None


def _format(name: str, value: object) -> StructuredOutputs | None:
    if value == "json":
        return StructuredOutputs(json_object=True, field=name)
    return None if value == "" else _schema(name, value)


_READERS: dict[str, Callable[[str, Any], StructuredOutputs | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
    "format": _format,
}
