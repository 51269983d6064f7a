"""ChunkTemplate: a chunk of a stream as JSON, complete but for the text, which differs from token to token.

Most chunks of a stream differ only there. To encode the text alone costs a tenth of building and encoding a document.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
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


class ChunkTemplates:
    """The templates of one answer, by choice and kind of text. Each is made when it is first needed."""

    def __init__(self) -> None:
        self._templates: dict[Hashable, ChunkTemplate] = {}

    def filled(self, key: Hashable, text: str, document: Callable[[str], dict[str, Any]]) -> bytes:
        """Returns the JSON of `document(text)`. For one `key`, documents must differ in the text alone."""
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = ChunkTemplate(document)
        return template.filled(text)
