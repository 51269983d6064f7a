"""From pydantic's errors to lines that say what to change: `spec.model.dtype: 'int3' is not allowed; use ...`."""

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
# Longer input is cut: a message is to be read.
_MAX_GIVEN = 80


def explain(error: ValidationError, root: type[BaseModel]) -> tuple[str, ...]:
    """One line per field at fault, in the document's order. `root` is the class that was validated."""
    return tuple(f"{_path(item['loc'])}: {_reason(item, root)}" for item in error.errors(include_url=False))


def source_hint(source: str, builtin_models: Collection[str]) -> str:
    """The model source that was probably meant, as the end of a sentence; empty where none is near."""
    hub = re.fullmatch(r"(?:https://huggingface\.co/)?([\w-][\w.-]*/[\w.-]+)/?", source)
    meant = None
    if source in builtin_models:
        meant = f"builtin://{source}"
    elif source.startswith("/"):
        meant = f"file://{source}"
    elif hub:
        meant = f"hf://{hub[1]}"
    return f"; did you mean {meant}?" if meant else ""


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
            # Our own validators speak for themselves: the message holds what was given and what to change.
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
    """From pydantic's "'a', 'b' or 'c'" to "one of a, b, c"."""
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
    """By alias, those of the map at `location`; a list's index stays with the list's element."""
    fields = {field.alias or name: field for name, field in root.model_fields.items()}
    if not location:
        return fields
    field = fields.get(str(location[0]))
    return _fields(location[1:], (_model_in(field.annotation) if field else None) or root)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, getattr(annotation, "__args__", ()))), None)
