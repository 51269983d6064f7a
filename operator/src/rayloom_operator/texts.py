"""Words that others have written, as they may stand in a status, an Event or a terminal. Pure."""

from __future__ import annotations

import re

# What a terminal acts on; Ray's logs are in colours.
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Words of a program on one line."""
    return " ".join(_CONTROLS.sub("", text).split())


def head(text: str, most: int) -> str:
    """The beginning, of at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def tail(text: str, most: int) -> str:
    """The end, of at most so many characters."""
    return text if len(text) <= most else "..." + text[3 - most :]


def head_bytes(text: str, most: int) -> str:
    """The beginning, of at most so many bytes of UTF-8; no character is cut in two."""
    encoded = text.encode()
    return text if len(encoded) <= most else encoded[: most - 3].decode(errors="ignore") + "..."
