"""Command lines as the page shows them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

LEFT_OUT = ("--host", "--port")  # flags that are left out, with their values


def shown(words: Sequence[str]) -> str:
    """The command as one line without host, port and the folders of absolute paths, which differ between machines."""
    kept = []
    is_value = False
    for word in words:
        if not is_value and word not in LEFT_OUT:
            kept.append(word.rstrip("/").rpartition("/")[2] if word.startswith("/") else word)
        is_value = word in LEFT_OUT
    return shlex.join(kept)
