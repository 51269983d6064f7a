"""Writes the tables of docs/api.md from the server's OpenAPI document: `make schemas`.

A table is between `<!-- begin NAME -->` and `<!-- end NAME -->`. The rest of the page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.document.openapi import openapi_document
from rayloom_engine.front.openai.fields.wire_schema import NO_EFFECT, extensions
from rayloom_engine.front.routes import ROUTES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
Schema = dict[str, Any]
# Table -> two lists of requests. The table has a field if all requests of the first list have it, and no request of the
# second list has it.
FIELD_TABLES = {
    "shared fields": (("ChatRequest", "CompletionRequest"), ()),
    "chat fields": (("ChatRequest",), ("CompletionRequest",)),
    "completion fields": (("CompletionRequest",), ("ChatRequest",)),
    "stream options": (("StreamOptions",), ()),
    "responses fields": (("ResponsesRequest",), ("ChatRequest",)),
    "responses text fields": (("TextOptions",), ()),
    "responses reasoning fields": (("ReasoningOptions",), ()),
    "messages fields": (("MessagesRequest",), ("ChatRequest",)),
    "messages thinking fields": (("ThinkingOptions",), ()),
    "tokenize fields": (("TokenizeRequest",), ()),
    "detokenize fields": (("DetokenizeRequest",), ()),
}


def the_document() -> Schema:
    return openapi_document(ROUTES, title="", version="", extensions=extensions())


def tables(document: Schema) -> dict[str, str]:
    """Name -> table in Markdown."""
    schemas = document["components"]["schemas"]
    found = {"endpoints": _endpoints(document["paths"])}
    for table, (models, others) in FIELD_TABLES.items():
        names = set.intersection(*(_used_fields(schemas[model]) for model in models))
        for other in others:
            names -= _used_fields(schemas[other])
        found[table] = _fields(schemas[models[-1]], {name for name, _ in names})
    found["fields without effect"] = _table(
        ("field", "known from", "why it changes nothing"),
        ((f"`{each['name']}`", each["origin"], each["reason"]) for each in document["x-fields-without-effect"]),
    )
    found["refused fields"] = _table(
        ("field", "known from", "what it asks for", "accepted besides null", "use instead"),
        (
            (
                f"`{each['name']}`",
                each["origin"],
                each["meaning"],
                ", ".join(f"`{shown(value)}`" for value in each["neutral"]),
                each["instead"] if " " in each["instead"] or not each["instead"] else f"`{each['instead']}`",
            )
            for each in document["x-refused-fields"]
        ),
    )
    return found


def written(page: str) -> str:
    """`page` with every table as generated from the code. Raises ValueError if the page has no place for a table."""
    for name, table in tables(the_document()).items():
        pattern = rf"(?<=<!-- begin {name} -->\n).*?(?=<!-- end {name} -->)"
        page, count = re.subn(pattern, table.replace("\\", r"\\"), page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the table {name!r}; it needs one")
    return page


def _endpoints(paths: Schema) -> str:
    rows: dict[str, list[str]] = {}  # summary -> endpoints
    for path, operations in paths.items():
        for method, operation in operations.items():
            place = re.sub(r"{(\w+)}", lambda found: found[1].upper(), path)
            rows.setdefault(operation["summary"], []).append(f"`{method.upper()} {place}`")
    return _table(("endpoint", "answer"), ((", ".join(places), summary) for summary, places in rows.items()))


def _used_fields(schema: Schema) -> set[tuple[str, str]]:
    """(name, meaning) of the fields that have an effect. Requests share a field if name and meaning are equal."""
    return {
        (name, field.get("description", "")) for name, field in schema["properties"].items() if NO_EFFECT not in field
    }


def _fields(schema: Schema, names: set[str]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        if name not in names:
            continue
        meaning, _, default = field.get("description", "").partition(" Default: ")
        if name in schema.get("required", ()):
            default = "required"
        elif not default and field.get("default") is not None:
            default = f"`{json.dumps(field['default'])}`"
        rows.append((f"`{name}`", _kind(field), _allowed(field), default.removesuffix("."), meaning))
    return _table(("field", "type", "allowed", "default", "meaning"), rows)


def _parts(field: Schema) -> list[Schema]:
    """The field's possible schemas without null, which every field allows."""
    return [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]


def _allowed(field: Schema) -> str:
    for part in _parts(field):
        low, high = part.get("minimum"), part.get("maximum")
        if low is not None:
            return f"at least {_number(low)}" if high is None else f"from {_number(low)} to {_number(high)}"
    return ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(field: Schema) -> str:
    """The type in a few words."""
    return " or ".join(dict.fromkeys(map(_one_kind, _parts(field))))


def _one_kind(schema: Schema) -> str:
    if "$ref" in schema:
        return "object"
    if schema.get("type") != "array":
        return str(schema.get("type", "any"))
    items = schema.get("items", {})
    if items.get("type") == "array":
        return f"list of lists of {items['items']['type']}s"
    return f"list of {items.get('type', 'object')}s"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of docs/{PAGE.name}")


if __name__ == "__main__":
    main()
