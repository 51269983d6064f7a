"""Writes the form of an answer as a grammar in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rayloom_engine.errors import RequestError
from rayloom_engine.grammar.closed_schemas import closed
from rayloom_engine.grammar.gbnf import is_gbnf, lark_of_gbnf
from rayloom_engine.grammar.limits import MAX_BYTES, check_bytes, check_rules, check_schema
from rayloom_engine.grammar.nullable_schemas import with_null
from rayloom_engine.structured_outputs import StructuredOutputs

# Without a limit of blanks, a small model at a high temperature may write blanks until max_tokens is reached.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# After its reasoning, a model begins the answer with line ends.
_BLANKS_AFTER = r"/[ \t\r\n]{0,16}/ "
_UNQUOTED = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff]")


def grammar_of(form: StructuredOutputs) -> str:
    """Returns the grammar of a form as text. Raises RequestError if the grammar is too large or cannot be parsed.

    The grammar may still have faults that only `validate` finds.
    """
    try:
        text = _lark_of(form)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{form.field} has half of a surrogate pair, which is not a character; remove it", form.field
        ) from error
    except RequestError as error:
        raise RequestError(f"{form.field}: {error}", form.field) from error
    return text


def _lark_of(form: StructuredOutputs) -> str:
    if form.regex is not None:
        check_bytes(form.regex)
        return f"start: /{_regex_in_lark(form.regex)}/"
    if form.choice is not None:
        # The choices form one terminal, because llguidance's parser fails at a token with which more than 2,000
        # alternatives begin.
        text = "start: C\nC: " + "|".join(_quoted(choice) for choice in form.choice)
        check_bytes(text)
        return text
    grammar = form.lark if form.lark is not None else form.grammar
    if grammar is not None:
        check_bytes(grammar)
        lark = lark_of_gbnf(grammar) if is_gbnf(grammar) else grammar
        check_rules(lark)
        return lark
    schema = {"type": "object"} if form.json_object else _schema_of(form)
    check_schema(schema)
    if not isinstance(schema, bool):
        own = schema.get("x-guidance")
        options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
        if isinstance(own, Mapping):
            options = dict(own) if "whitespace_flexible" in own else {**options, **own}
        if form.is_lenient:
            options["lenient"] = True
        schema = {**closed(with_null(schema)), "x-guidance": options}
    text = json.dumps(schema, ensure_ascii=False)
    check_bytes(text)
    return f"start: {_BLANKS_AFTER if form.after else ''}form\nform: %json {text}"


def _schema_of(form: StructuredOutputs) -> Mapping[str, Any] | bool:
    schema = form.json
    if isinstance(schema, str):
        if len(schema) > MAX_BYTES:
            check_bytes(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"a JSON schema must be an object or a boolean, given {type(schema).__name__}")
    return schema


def _quoted(text: str) -> str:
    """Returns `text` as a Lark string, which has the escapes of a JSON string."""
    return _UNQUOTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _regex_in_lark(regex: str) -> str:
    """Returns the regular expression with the escapes that it needs between Lark's slashes."""
    parts = []
    is_escaped = False
    for char in regex:
        if char == "/" and not is_escaped:
            parts.append("\\/")
        elif char == "\n":
            parts.append("n" if is_escaped else "\\n")
        elif char == "\r":
            parts.append("r" if is_escaped else "\\r")
        else:
            parts.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(parts)
