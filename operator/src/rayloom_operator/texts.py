"""Shortens and cleans text from outside before it enters a status, an Event or a terminal. Pure."""

from __future__ import annotations

import re

# Control sequences of terminals: Ray's logs contain colours.
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Returns a program's output on one line, without control sequences."""
    return " ".join(_CONTROLS.sub("", text).split())


def head(text: str, most: int) -> str:
    """Returns the text, cut to `most` characters if it is longer; the cut text ends with `...`."""
    return text if len(text) <= most else text[: most - 3] + "..."


def tail(text: str, most: int) -> str:
    """Returns the text, cut to its last characters if it is longer than `most`; the cut text begins with `...`."""
    return text if len(text) <= most else "..." + text[3 - most :]


def head_bytes(text: str, most: int) -> str:
    """Returns the text, cut to `most` bytes of UTF-8 if it is longer; the cut text ends with `...`.

    No character is cut in two.
    """
    encoded = text.encode()
    return text if len(encoded) <= most else encoded[: most - 3].decode(errors="ignore") + "..."
