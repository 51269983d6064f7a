"""A call as a name before a JSON object, as Mistral's models write it: get_weather[ARGS]{"city": "Paris"}."""

from __future__ import annotations

import re

from rayloom_engine.text.message_parsing.calls.json_values import json_value
from rayloom_engine.text.message_parsing.incoming import IncomingText, NoCall, Reading, blanks
from rayloom_engine.text.message_parsing.sink import PartSink

MAX_HEADER_CHARS = 256  # the most characters in front of the object
_HEADER = re.compile(r"([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?", re.ASCII)


def named_call(incoming: IncomingText, sink: PartSink) -> Reading[None]:
    """Reads a call. A call id that the model writes is ignored."""
    yield from blanks(incoming)
    while (end := incoming.text.find("{", incoming.at)) < 0:
        if incoming.is_ended or len(incoming.text) - incoming.at > MAX_HEADER_CHARS:
            raise NoCall
        yield
    header = _HEADER.fullmatch(incoming.text, incoming.at, end)
    if header is None or end - incoming.at > MAX_HEADER_CHARS:
        raise NoCall
    incoming.at = end
    incoming.release()
    sink.start(header[1])
    yield from json_value(incoming, sink.arguments)
