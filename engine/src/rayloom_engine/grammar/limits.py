"""Limits of grammars, so that no request can keep a thread or a rank busy.

llguidance limits its own work, but its recursion follows the nesting of a grammar and its chains of references, and
its time grows with the square of an object's number of properties. docs/design/engine-grammar.md has measurements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rayloom_engine.errors import RequestError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 100  # objects and lists inside each other
MAX_PROPERTIES = 400  # of one object
MAX_REFERENCES = 500  # occurrences of `$ref`
MAX_RULES = 1000

_RULE = re.compile(
    r"^[ \t]*[?!]?_?[A-Za-z]\w*[^\S\n]*(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?(?:\.-?\d+)?[^\S\n]*:", re.MULTILINE
)


def check_bytes(text: str) -> None:
    """Raises RequestError for a grammar or schema of more than MAX_BYTES."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_BYTES:
        raise RequestError(f"the grammar has {num_bytes} bytes, at most {MAX_BYTES} are allowed; make it smaller")


def check_rules(lark: str) -> None:
    """Raises RequestError for a Lark grammar of more than MAX_RULES rules."""
    num_rules = len(_RULE.findall(lark))
    if num_rules > MAX_RULES:
        raise RequestError(f"the grammar has {num_rules} rules, at most {MAX_RULES} are allowed")
    # A grammar can contain JSON schemas, whose references it does not count as rules.
    num_references = lark.count('"$ref"')
    if num_references > MAX_REFERENCES:
        raise RequestError(f"the grammar has {num_references} times $ref, at most {MAX_REFERENCES} are allowed")


def check_schema(schema: Mapping[str, Any] | bool) -> None:
    """Raises RequestError for a JSON schema that is too deep or too wide."""
    num_references = 0
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                _check_properties(value)
                num_references += "$ref" in value
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
        level = below
    if any(isinstance(value, Mapping | list | tuple) for value in level):
        raise RequestError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep; make it flatter")
    if num_references > MAX_REFERENCES:
        raise RequestError(f"the JSON schema has {num_references} times $ref, at most {MAX_REFERENCES} are allowed")


def _check_properties(schema: Mapping[str, Any]) -> None:
    for name in ("properties", "patternProperties"):
        properties = schema.get(name)
        if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
            raise RequestError(
                f"an object of the JSON schema has {len(properties)} {name}, at most {MAX_PROPERTIES} are allowed"
            )
