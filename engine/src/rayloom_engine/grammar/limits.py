"""Limits of grammars, so that no request can keep a thread or a rank busy.

llguidance limits its own work, but it recurses along the nesting of a grammar and along chains of references. Its time
grows with the square of the number of properties that an object has. Its time also grows with the number of objects
that `allOf` merges. docs/design/engine-grammar.md has measurements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rayloom_engine.errors import RequestError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 100  # the most objects and lists inside each other
MAX_PROPERTIES = 400  # the most properties of one object
MAX_REFERENCES = 500  # the most occurrences of `$ref`
MAX_RULES = 1000
# The most alternatives of one rule. llguidance's parser tracks at most 2,000 items at a time, and fails at the first
# token with more items. With a higher limit in the parser, 16,000 equal alternatives would keep a rank busy for 0.4 s.
MAX_ALTERNATIVES = 1990
# The most merged properties: the number of schemas that are merged with others, times the number of properties of the
# largest object. Each merge makes a new object. 3,200 properties take 0.07 s in the front and 0.17 s in the rank, 8,000
# properties take 0.18 s and 0.35 s.
MAX_MERGED_PROPERTIES = 4000

_RULE = re.compile(
    r"^[ \t]*[?!]?_?[A-Za-z]\w*[^\S\n]*(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?(?:\.-?\d+)?[^\S\n]*:", re.MULTILINE
)

_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/')
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_MERGES = ("allOf", "anyOf", "oneOf")  # lists of schemas
# If one of these keywords is beside `$ref` or a keyword of _MERGES, llguidance merges the schemas. A description beside
# them causes no merge.
_CONSTRAINTS = ("$ref", *_MERGES, "type", "properties", "patternProperties", "additionalProperties", "required")


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
    _check_alternatives(lark)
    _check_merged(sum(_num_embedded(lark, found.end()) for found in _EMBEDDED.finditer(lark)))
    # A grammar can contain JSON schemas. References in these schemas are no rules, so they have a limit of their own.
    num_references = lark.count('"$ref"')
    if num_references > MAX_REFERENCES:
        raise RequestError(f"the grammar has {num_references} times $ref, at most {MAX_REFERENCES} are allowed")


def _check_alternatives(lark: str) -> None:
    """Raises RequestError if a rule has more than MAX_ALTERNATIVES. Terminals may have more: each is one lexeme."""
    if lark.count("|") < MAX_ALTERNATIVES:
        return
    text = _LITERAL.sub('""', lark)
    found = list(_RULE.finditer(text))
    ends = [*(rule.start() for rule in found[1:]), len(text)]
    for rule, end in zip(found, ends, strict=True):
        name = rule[0].strip(" \t?!_").split(":")[0]
        num = text.count("|", rule.end(), end) + 1
        if num > MAX_ALTERNATIVES and name[:1].islower():
            raise RequestError(
                f"the grammar has a rule with {num} alternatives, at most {MAX_ALTERNATIVES} are allowed; make it a "
                "terminal (in Lark a name in capitals, in GBNF a rule that is not root and refers to no recursive "
                "rule), or ask for choice"
            )


def check_schema(schema: Mapping[str, Any] | bool) -> None:
    """Raises RequestError for a JSON schema that is too deep or too wide, or merges too much."""
    _check_merged(_num_merged_properties(schema))


def _num_merged_properties(schema: Mapping[str, Any] | bool) -> int:
    """Returns an upper bound of the merged properties. Raises RequestError if the schema exceeds another limit."""
    num_references = 0
    num_merged = 0
    most_properties = 0
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                most_properties = max(most_properties, _num_properties(value))
                num_merged += _num_merged(value)
                num_references += "$ref" in value
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
        level = below
    if any(isinstance(value, Mapping | list | tuple) for value in level):
        raise RequestError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep; make it flatter")
    if num_references > MAX_REFERENCES:
        raise RequestError(f"the JSON schema has {num_references} times $ref, at most {MAX_REFERENCES} are allowed")
    return num_merged * most_properties


def _check_merged(num_properties: int) -> None:
    if num_properties > MAX_MERGED_PROPERTIES:
        raise RequestError(
            f"the JSON schema merges objects (allOf, or $ref, anyOf and oneOf beside other keywords) with about "
            f"{num_properties} properties in all (schemas that are merged x properties of the largest object), at most "
            f"{MAX_MERGED_PROPERTIES} are allowed; write the merged objects out, or make them smaller"
        )


def _num_properties(schema: Mapping[str, Any]) -> int:
    """Returns the number of properties or the number of patternProperties, whichever is larger.

    Raises RequestError if it is above MAX_PROPERTIES.
    """
    most = 0
    for name in ("properties", "patternProperties"):
        properties = schema.get(name)
        if not isinstance(properties, Mapping):
            continue
        if len(properties) > MAX_PROPERTIES:
            raise RequestError(
                f"an object of the JSON schema has {len(properties)} {name}, at most {MAX_PROPERTIES} are allowed"
            )
        most = max(most, len(properties))
    return most


def _num_merged(schema: Mapping[str, Any]) -> int:
    """Returns the number of schemas that `schema` merges; 0 if it is only a reference or a list of alternatives."""
    lists = [schema[name] for name in _MERGES if isinstance(schema.get(name), list | tuple)]
    num_parts = sum(map(len, lists)) + isinstance(schema.get("$ref"), str)
    all_of = schema.get("allOf")
    is_alone = sum(name in schema for name in _CONSTRAINTS) == 1
    if is_alone and not (isinstance(all_of, list | tuple) and len(all_of) > 1):
        return 0
    return num_parts


def _num_embedded(lark: str, start: int) -> int:
    """Returns _num_merged_properties of the JSON schema that begins at index `start` of a Lark grammar.

    Returns 0 for a text that is not JSON, because llguidance refuses such a grammar.
    """
    try:
        schema, _ = json.JSONDecoder().raw_decode(lark, start)
    except ValueError:
        return 0
    except RecursionError as error:
        raise RequestError(f"a JSON schema is nested more than {MAX_DEPTH} levels deep; make it flatter") from error
    return _num_merged_properties(schema)
