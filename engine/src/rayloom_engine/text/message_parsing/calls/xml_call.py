"""A call with a tag for each argument, as Qwen3-Coder writes it.

<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayloom_engine.text.message_parsing.calls.xml_values import converted, is_text, resolved
from rayloom_engine.text.message_parsing.incoming import IncomingText, Markers, NoCall, Reading, blanks, one_of, until
from rayloom_engine.text.message_parsing.sink import PartSink

MAX_NAME_CHARS = 256
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_VALUE_END = Markers((f"\n{_PARAMETER_END}", _PARAMETER_END))


def xml_call(incoming: IncomingText, sink: PartSink) -> Reading[None]:
    """Reads a call. Texts are streamed; any other value is converted by the function's schema once it is complete."""
    yield from blanks(incoming)
    if not (yield from one_of(incoming, (_FUNCTION,))):
        raise NoCall
    name = yield from _name(incoming)
    incoming.release()
    sink.start(name)
    sink.arguments("{")
    schema = sink.rules.schemas.get(name, {})
    separator = ""
    while True:
        yield from blanks(incoming)
        tag = yield from one_of(incoming, (_PARAMETER, _FUNCTION_END))
        if tag != _PARAMETER:
            break
        try:
            key = yield from _name(incoming)
        except NoCall:
            return
        sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _value(incoming, sink, _schema_of(schema, key))):
            return
    if tag or not incoming.text[incoming.at :]:
        # Arguments that were cut off inside a value or a tag must not look complete.
        sink.arguments("}")


def _name(incoming: IncomingText) -> Reading[str]:
    """Reads a name and the ">" behind it. Raises NoCall if there is no such name."""
    while (end := incoming.text.find(">", incoming.at)) < 0:
        if incoming.is_ended or len(incoming.text) - incoming.at > MAX_NAME_CHARS:
            raise NoCall
        yield
    name = incoming.text[incoming.at : end].strip()
    if not name or not name.isprintable() or "<" in name or end - incoming.at > MAX_NAME_CHARS:
        raise NoCall
    incoming.at = end + 1
    return name


def _value(incoming: IncomingText, sink: PartSink, schema: Mapping[str, Any]) -> Reading[bool]:
    """Reads a value and its end tag. The value excludes line ends next to tags. Returns False without an end tag."""
    yield from one_of(incoming, ("\n",))
    if not is_text(schema):
        pieces: list[str] = []
        if not (yield from until(incoming, _VALUE_END, pieces.append)):
            return False
        # ASCII, because a text in an array may have half of a surrogate pair.
        sink.arguments(json.dumps(converted("".join(pieces), schema)))
        return True
    sink.arguments('"')
    if not (yield from until(incoming, _VALUE_END, lambda text: sink.arguments(_escaped(text)))):
        return False
    sink.arguments('"')
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _schema_of(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return resolved(found, schema) if isinstance(found, Mapping) else {"type": "string"}
