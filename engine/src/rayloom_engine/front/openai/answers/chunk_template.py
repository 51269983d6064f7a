"""ChunkTemplate: a chunk of a stream as JSON, complete but for the text, which differs from token to token.

Most chunks of a stream differ only there. To encode the text alone costs a tenth of building and encoding a document.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

# Stands for the text. Nothing that a client sends can contain it.
_MARK = f"text-{secrets.token_hex(16)}"

_encode = msgspec.json.Encoder().encode


class ChunkTemplate:
    """The JSON of one document, with gaps for a text."""

    def __init__(self, document: Callable[[str], dict[str, Any]]) -> None:
        """`document` makes the document for a text."""
        self._pieces = _encode(document(_MARK)).split(_encode(_MARK))

    def filled(self, text: str) -> bytes:
        """Returns the same bytes as the encoded document for `text`."""
        return _encode(text).join(self._pieces)
