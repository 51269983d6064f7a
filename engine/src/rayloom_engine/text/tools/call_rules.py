"""Rules of llguidance's Lark syntax for the arguments of one call, in each syntax of calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayloom_engine.text.message_parsing.calls.xml_values import is_text, resolved

ANY_TEXT = r"/(.|\n)*/"
BLANKS = r"/[ \t\r\n]{0,16}/"
# One blank after commas and colons: with free blanks, a weak model would fill the answer with line ends.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tagged_arguments(rule: str, name: str, schema: Mapping[str, Any], *, is_strict: bool) -> list[str]:
    """Returns the rules of a call with a tag for each argument, in the schema's order."""
    properties = _properties(schema)
    rules = []
    expression = []
    for position, (key, given) in enumerate(properties.items()):
        inner = resolved(given, schema)
        value = f"{rule}_{position}"
        optional = "" if key in schema.get("required", ()) else "?"
        expression.append(f"{value}{optional}")
        begin = quoted(f"<parameter={key}>\n")
        if is_text(inner) and not inner.get("enum"):
            rules += [f"{value}: {begin} {value}_text {quoted(chr(10))}", lazy_text(f"{value}_text", "</parameter>")]
        else:
            rules.append(f"{value}: {begin} {value}_json {quoted(chr(10) + '</parameter>' + chr(10))}")
            rules.append(_plain_value(f"{value}_json", inner, schema, is_strict=is_strict))
    if not properties and schema.get("additionalProperties") is not False:
        expression.append(f"{rule}_any*")
        rules.append(f'{rule}_any: "<parameter=" /[A-Za-z_][A-Za-z0-9_]*/ ">\\n" {rule}_text "\\n"')
        rules.append(lazy_text(f"{rule}_text", "</parameter>"))
    begin = quoted(f"<function={name}>\n")
    return [f"{rule}: {begin} {' '.join(expression)} {quoted('</function>')}", *rules]


def _plain_value(rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], *, is_strict: bool) -> str:
    """Returns the rule of a value that is no free text: words of an enumeration without quotes, or JSON."""
    if is_text(schema):
        return f"{rule}: " + " | ".join(map(quoted, schema["enum"]))
    return json_rule(rule, _with_definitions(schema, root), is_strict=is_strict)


def keyword_arguments(rule: str, name: str, schema: Mapping[str, Any], *, is_strict: bool) -> list[str]:
    """Returns the rules of a call in Python's syntax. Values are JSON. The parser of Python calls reads JSON, too."""
    properties = list(_properties(schema).items())
    begin = quoted(f"{name}(")
    rules = [f"{rule}: {begin} {rule}_first_0 {quoted(')')}"]
    for position, (key, inner) in enumerate(properties):
        item = f"{rule}_{position}"
        is_required = key in schema.get("required", ())
        rest = f"{rule}_rest_{position + 1}"
        later = f'", " {item} {rest}'
        rules += [
            f"{item}: {quoted(f'{key}=')} {item}_json",
            json_rule(f"{item}_json", _with_definitions(inner, schema), is_strict=is_strict),
            f"{rule}_first_{position}: {item} {rest}" + ("" if is_required else f" | {rule}_first_{position + 1}"),
        ]
        if position:
            rules.append(f"{rule}_rest_{position}: {later}" + ("" if is_required else f" | {rest}"))
    rules.append(f'{rule}_first_{len(properties)}: ""')
    if properties:
        rules.append(f'{rule}_rest_{len(properties)}: ""')
    return rules


def json_rule(rule: str, schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Returns the rule of a JSON value. Keywords that cannot be enforced are errors only for strict tools."""
    guidance = {**_SPACING, "lenient": not is_strict}
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': guidance})}"


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: inner if isinstance(inner, Mapping) else {} for key, inner in properties.items()}


def grammar(start: str, *rules: str) -> str:
    """Returns a grammar that begins with the expression `start`."""
    return "\n".join((f"start: {start}", *rules)) + "\n"


def sequence(*expressions: str) -> str:
    """Joins the expressions in order, without the empty ones."""
    return " ".join(filter(None, expressions))


def lazy_text(rule: str, end: str) -> str:
    """Returns the rule of a text that ends with the first `end`."""
    escaped = "".join(f"\\{char}" if char in r"\/.*+?()[]{}|^$" else char for char in end).replace("\n", r"\n")
    return rf"{rule}[lazy]: /(.|\n)*{escaped}/"


def quoted(text: str) -> str:
    """Returns the grammar expression that matches exactly `text`."""
    return json.dumps(text)
