"""Writes the tables of docs/api.md from the code that they describe: `make schemas`.

A table lies between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.openai.fields import NOT_IMPLEMENTED, WITHOUT_EFFECT
from rayloom_engine.front.openai.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from rayloom_engine.sampling_params import RANGES, SamplingParams

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
# Fields that are settings of SamplingParams under another name.
RANGE_OF = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def tables() -> dict[str, str]:
    """Name -> table in Markdown."""
    shared = set(GenerationRequest.model_fields)
    return {
        "shared fields": _fields(GenerationRequest, shared),
        "chat fields": _fields(ChatRequest, set(ChatRequest.model_fields) - shared),
        "completion fields": _fields(CompletionRequest, set(CompletionRequest.model_fields) - shared),
        "stream options": _fields(StreamOptions, set(StreamOptions.model_fields)),
        "tokenize fields": _fields(TokenizeRequest, set(TokenizeRequest.model_fields)),
        "detokenize fields": _fields(DetokenizeRequest, set(DetokenizeRequest.model_fields)),
        "fields without effect": _table(
            ("field", "known from", "why it changes nothing"),
            ((f"`{field.name}`", field.origin, field.reason) for field in WITHOUT_EFFECT.values()),
        ),
        "refused fields": _table(
            ("field", "known from", "what it asks for", "accepted besides null", "use instead"),
            (
                (
                    f"`{field.name}`",
                    field.origin,
                    field.meaning,
                    ", ".join(f"`{shown(value)}`" for value in field.neutral),
                    field.instead if " " in field.instead or not field.instead else f"`{field.instead}`",
                )
                for field in NOT_IMPLEMENTED.values()
            ),
        ),
    }


def written(page: str) -> str:
    """`page` with every table as generated from the code. Raises ValueError for a table without a place on it."""
    for name, table in tables().items():
        pattern = rf"(?<=<!-- begin {name} -->\n).*?(?=<!-- end {name} -->)"
        page, count = re.subn(pattern, table.replace("\\", r"\\"), page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the table {name!r}; it needs one")
    return page


def _fields(model: type[BaseModel], names: set[str]) -> str:
    properties = model.model_json_schema()["properties"]
    rows = []
    for name, field in model.model_fields.items():
        if name not in names:
            continue
        kind = _kind(properties[name])
        allowed = RANGES.get(RANGE_OF.get(name, name))
        meaning, _, default = (field.description or "").partition(" Default: ")
        words = allowed.words if allowed is not None and kind != "boolean" else ""
        rows.append((f"`{name}`", kind, words, default.removesuffix(".") or _default(name, field), meaning))
    return _table(("field", "type", "allowed", "default", "meaning"), rows)


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = DEFAULTS.get(name)
    if value is None or isinstance(value, tuple | type(dataclasses.MISSING)):
        return ""
    return f"`{json.dumps(value)}`"


def _kind(schema: dict[str, Any]) -> str:
    """The type in a few words, without null, which every field allows."""
    kinds = [_one_kind(part) for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return " or ".join(dict.fromkeys(kinds))


def _one_kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "object"
    if schema.get("type") != "array":
        return str(schema.get("type", ""))
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
