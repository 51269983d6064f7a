"""Ids of tool calls. Pure: a front that repeats an answer gives the tool calls the same ids."""

from __future__ import annotations

import hashlib
import string

_LETTERS = string.digits + string.ascii_letters
_NUM_CHARS = 24
_NUM_SHORT_CHARS = 9  # the templates of Mistral's models refuse any other length


def call_id(origin: str, index: int, *, is_short: bool) -> str:
    """Returns the id of call number `index` in the choice that `origin` names."""
    number = int.from_bytes(hashlib.sha256(f"{origin}/{index}".encode()).digest(), "big")
    chars = []
    for _ in range(_NUM_SHORT_CHARS if is_short else _NUM_CHARS):
        number, rest = divmod(number, len(_LETTERS))
        chars.append(_LETTERS[rest])
    return "".join(chars) if is_short else f"call_{''.join(chars)}"
