"""A call as a JSON object with name and arguments: {"name": "get_weather", "arguments": {"city": "Paris"}}."""

from __future__ import annotations

import json
import re

from rayloom_engine.text.message_parsing.calls.json_values import json_text, json_value
from rayloom_engine.text.message_parsing.incoming import IncomingText, NoCall, Reading, blanks
from rayloom_engine.text.message_parsing.sink import PartSink

_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)


def object_call(incoming: IncomingText, sink: PartSink, *, needs_known_name: bool) -> Reading[None]:
    """Reads a call. Its keys may have any order, and keys other than those of name and arguments are ignored.

    A call without arguments has an empty object. With `needs_known_name`, an object is a call only if it has arguments
    and its name is a function of the request.
    """
    if (yield from blanks(incoming)) != "{":
        raise NoCall
    incoming.at += 1
    name: str | None = None
    early: str | None = None  # arguments that came before the name, or that are written as a string
    is_started = False
    try:
        while (yield from _has_key(incoming)):
            key = json.loads((yield from json_text(incoming)), strict=False)
            if (yield from blanks(incoming)) != ":":
                raise NoCall
            incoming.at += 1
            char = yield from blanks(incoming)
            if key in _ARGUMENTS and char == "{" and name is not None and not is_started:
                is_started = True
                _start(incoming, sink, name)
                if not (yield from json_value(incoming, sink.arguments)):
                    return
                continue
            value = yield from json_text(incoming)
            if key == "name":
                name = _checked_name(value, sink, needs_known_name)
            elif key in _ARGUMENTS:
                early = _object_text(value)
    except (NoCall, ValueError, RecursionError) as error:
        if is_started:
            return
        raise NoCall from error
    if is_started:
        return
    if name is None or (early is None and needs_known_name):
        raise NoCall
    _start(incoming, sink, name)
    sink.arguments(early or "{}")


def _has_key(incoming: IncomingText) -> Reading[bool]:
    """Reads up to the next key and returns True, or reads the end of the object and returns False.

    Raises NoCall if the text continues in another way.
    """
    char = yield from blanks(incoming)
    if char == ",":
        incoming.at += 1
        char = yield from blanks(incoming)
    if char == "}":
        incoming.at += 1
        return False
    if char != '"':
        raise NoCall
    return True


def _start(incoming: IncomingText, sink: PartSink, name: str) -> None:
    incoming.release()
    sink.start(name)


def _checked_name(value: str, sink: PartSink, needs_known_name: bool) -> str:
    name = json.loads(value)
    if (
        not isinstance(name, str)
        or _NAME.fullmatch(name) is None
        or (needs_known_name and name not in sink.rules.schemas)
    ):
        raise NoCall
    return name


def _object_text(value: str) -> str:
    """Returns a call's arguments as the text of an object.

    Some models write the arguments as a string, and null if there are no arguments.
    """
    if value.startswith('"'):
        value = json.loads(value, strict=False)
        value.encode()  # raises ValueError for half of a surrogate pair
        if not isinstance(json.loads(value), dict):
            raise NoCall
        return value
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise NoCall
    return value
