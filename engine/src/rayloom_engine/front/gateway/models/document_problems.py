"""Turns pydantic's errors about a ModelsDocument into lines that say what to change and never show a key.

For example `aliases.a.sticky_by: "session" is not allowed; use "user" or null`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rayloom_engine.common.json_words import shown
from rayloom_engine.config import EngineConfig
from rayloom_engine.protocol.front_key import MIN_KEY_CHARS

Path = tuple[str, ...]
FieldsAt = Callable[[Path], Mapping[str, FieldInfo]]

_TYPES_IN_WORDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "a list",
}
_NUMBERS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_ADVICE_IF_MISSING = {
    "version": 'set it to "v1"',
    "models": "give an object with an entry for each model",
    "key": "copy the content of the engines' front_key_file",
    "targets": "list the models behind the name, each with its weight",
    "model": "set it to a name in `models`",
    "weight": "set it to the target's share of the requests, such as 1",
}


def explain(error: ValidationError, fields_at: FieldsAt, place: Path = ()) -> list[str]:
    """Returns one line for each wrong field.

    `fields_at` returns the fields of the object at a path. `place`: the path of the value that was validated. If an
    object or list has a wrong field inside, the error of the object or list itself is left out, because the wrong field
    causes this error.
    """
    items = [((*place, *(str(part) for part in item["loc"])), item) for item in error.errors(include_url=False)]
    paths = [path for path, _ in items]
    return [
        _line(path, item, fields_at)
        for path, item in items
        if not any(len(path) < len(other) and other[: len(path)] == path for other in paths)
    ]


def _line(path: Path, item: ErrorDetails, fields_at: FieldsAt) -> str:
    field = ".".join(path) or "the document"
    kind = item["type"]
    if kind == "missing":
        return f"{field}: missing; {_ADVICE_IF_MISSING[path[-1]]}"
    if kind == "extra_forbidden":
        return _unknown(path, fields_at)
    if path and path[-1] in ("key", "previous_key"):  # the value is a secret
        return f"{field}: must be a string with at least {MIN_KEY_CHARS} characters"
    return f"{field}: {_reason(path, item, fields_at(path[:-1]))}"


def _reason(path: Path, item: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    # These values may contain keys: an object, a list, and any value in the place of a whole entry.
    may_have_keys = isinstance(item["input"], dict | list) or (len(path) < 3 and path != ("version",))
    given = "this value" if may_have_keys else shown(item["input"])
    kind = item["type"]
    context = item.get("ctx", {})
    known = fields.get(path[-1]) if path else None
    can_be_null = known is not None and type(None) in get_args(known.annotation)
    if kind == "literal_error":
        allowed = context["expected"].replace("'", '"')
        return f"{given} is not allowed; use {allowed}{' or null' if can_be_null else ''}"
    if kind in _NUMBERS and known is not None:
        size = "small" if kind.startswith("greater") else "large"
        return f"{given} is too {size}; use {_range(known)}"
    if kind in _TYPES_IN_WORDS:
        return f"{given} is not allowed; this must be {_TYPES_IN_WORDS[kind]}{' or null' if can_be_null else ''}"
    if kind == "too_short":
        return "is empty; give it at least one entry"
    return f"{given} is not allowed: {item['msg']}"


def _range(field: FieldInfo) -> str:
    bounds: dict[str, Any] = {}
    for each in field.metadata:
        bounds |= {name: getattr(each, name) for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    if bounds.keys() == {"ge", "le"}:
        return f"{bounds['ge']} to {bounds['le']}"
    words = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}
    return " and ".join(words[name].format(bound) for name, bound in bounds.items())


def _unknown(path: Path, fields_at: FieldsAt) -> str:
    *above, name = path
    fields = ", ".join(fields_at(tuple(above)))
    if above[-1:] == ["settings"]:
        reason = f"{name} is not a setting of one model" if name in EngineConfig.model_fields else f"no setting {name}"
        return f"{'.'.join(above)}: {reason}; a model may have {fields}"
    return f"{'.'.join(above) or 'the document'}: there is no field {name}; the fields are {fields}"
