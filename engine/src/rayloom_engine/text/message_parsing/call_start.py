"""Decides whether a tool call begins behind an opener, by a limited number of characters.

Reasoning may mention an opener, such as `<tool_call>`, without a call. The parser and the limit of the reasoning's
tokens, which a rank applies, both ask this module. So they agree on the end of the reasoning.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from rayloom_engine.text.message_parsing.tool_formats import ToolFormat

MAX_START_CHARS = 512  # if this many characters do not show the beginning of a call, there is none

_BLANKS = r"[ \t\r\n]*"
_LIST = (r"\[", _BLANKS)
_NAME = r"[\w.-]{1,64}"


def begins_call(text: str, format: ToolFormat, *, is_ended: bool = False) -> bool | None:
    """Returns whether `text` begins with the beginning of a call: all up to its name, or up to its first value.

    Returns None while more text is needed. `is_ended`: no more text follows. `text` is what follows an opener of
    `format`; a bare opener is itself part of `text`.
    """
    starts = _starts_of(format)
    text = text[:MAX_START_CHARS]
    if starts.whole.match(text):
        return True
    if is_ended or len(text) == MAX_START_CHARS or not starts.open.fullmatch(text):
        return False
    return None


@dataclass(frozen=True, slots=True)
class _Starts:
    whole: re.Pattern[str]  # matches the beginnings of calls
    open: re.Pattern[str]  # matches whatever may become the beginning of a call


@functools.cache
def _starts_of(format: ToolFormat) -> _Starts:
    options = _options(format)
    wholes = ("".join(parts) for parts in options)
    return _Starts(re.compile("|".join(wholes), re.ASCII), re.compile("|".join(map(_open, options)), re.ASCII))


def _options(format: ToolFormat) -> list[tuple[str, ...]]:
    """Returns the beginnings of calls, each as patterns that follow one another."""
    if format.syntax == "xml":
        return [(_BLANKS, *"<function=", "[^<>]{1,256}", ">")]
    if format.syntax == "python":
        return [(_BLANKS, *_LIST, _NAME, r"\(")]
    name = (*'"name"', _BLANKS, ":", _BLANKS, '"', r"[\w.:/-]{1,256}", '"')
    other_key = ('"', r'(?!name")[^"\\]{1,64}', '"', _BLANKS, ":", _BLANKS, r'["{\[\dtfn-]')
    calls: list[tuple[str, ...]] = [(r"\{", _BLANKS, *name), (r"\{", _BLANKS, *other_key)]
    if format.syntax == "named":
        calls.append((_NAME, _BLANKS, r"[\[{]"))
    heads = ((_BLANKS,), (_BLANKS, *_LIST)) if format.is_list else ((_BLANKS,),)
    return [(*head, *call) for head in heads for call in calls]


def _open(parts: tuple[str, ...]) -> str:
    """Returns a pattern for the beginnings of `parts`, the empty text included."""
    pattern = ""
    for part in reversed(parts):
        pattern = f"(?:{part}{pattern})?"
    return pattern
