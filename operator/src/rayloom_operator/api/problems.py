"""Turns pydantic's errors into lines that say what to change: `spec.model.dtype: 'int3' is not allowed; use ...`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_TYPES_IN_WORDS = {
    "string_type": "text; put it in quotes",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "tuple_type": "a list",
}
_MAX_GIVEN = 80  # characters of the given value that a message shows


def explain(error: ValidationError, root: type[BaseModel]) -> tuple[str, ...]:
    """Returns one line for each invalid field, in the document's order. `root` is the class that was validated."""
    return tuple(f"{_path(item['loc'])}: {_reason(item, root)}" for item in error.errors(include_url=False))


def source_hint(source: str, builtin_models: Collection[str]) -> str:
    """Returns a text such as `; did you mean hf://...?`, with the source that the user probably meant.

    Returns an empty text if no source is likely.
    """
    hub = re.fullmatch(r"(?:https://huggingface\.co/)?([\w-][\w.-]*/[\w.-]+)/?", source)
    suggestion = None
    if source in builtin_models:
        suggestion = f"builtin://{source}"
    elif source.startswith("/"):
        suggestion = f"file://{source}"
    elif hub:
        suggestion = f"hf://{hub[1]}"
    return f"; did you mean {suggestion}?" if suggestion else ""


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or "(document)"


def _reason(item: ErrorDetails, root: type[BaseModel]) -> str:
    given = _given(item["input"])
    context = item.get("ctx", {})
    match item["type"]:
        case "missing":
            return f"is missing; add it{_description(item['loc'], root)}"
        case "extra_forbidden":
            return _unknown_field(item["loc"], root)
        case "literal_error":
            return f"{given} is not allowed; use {_alternatives(context['expected'])}"
        case "value_error":
            # The messages of our own validators already contain the given value and what to change.
            return str(context["error"])
        case "greater_than_equal":
            return f"{given} is too small; use {context['ge']} or more"
        case "less_than_equal":
            return f"{given} is too large; use {context['le']} or less"
        case "string_too_short":
            return "is empty; give it a value, or remove the field"
        case "string_too_long":
            return f"{given} has {len(item['input'])} characters; use at most {context['max_length']}"
        case "string_pattern_mismatch":
            return f"{given} is not allowed{_description(item['loc'], root)}"
        case kind if kind in _TYPES_IN_WORDS:
            return f"{given} is not allowed; this must be {_TYPES_IN_WORDS[kind]}"
        case _:
            return f"{given} is not allowed: {item['msg']}"


def _given(value: object) -> str:
    if value is None:
        return "an empty value"
    text = repr(value)
    return text if len(text) <= _MAX_GIVEN else text[: _MAX_GIVEN - 3] + "..."


def _alternatives(expected: str) -> str:
    """Returns pydantic's "'a', 'b' or 'c'" as "one of a, b, c"."""
    values = [value.strip("'") for value in expected.replace(" or ", ", ").split(", ")]
    return values[0] if len(values) == 1 else "one of " + ", ".join(values)


def _unknown_field(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    known = list(_fields(location[:-1], root))
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"is not a field; did you mean {close[0]}?"
    return f"is not a field; remove it. Fields here: {', '.join(known)}"


def _description(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    field = _fields(location[:-1], root).get(str(location[-1]))
    return f". {field.description}" if field is not None and field.description else ""


def _fields(location: tuple[int | str, ...], root: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns alias -> field of the class at `location`.

    List indexes in `location` are skipped, because all elements of a list have the same class.
    """
    fields = {field.alias or name: field for name, field in root.model_fields.items()}
    if not location:
        return fields
    field = fields.get(str(location[0]))
    return _fields(location[1:], (_model_in(field.annotation) if field else None) or root)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, getattr(annotation, "__args__", ()))), None)
