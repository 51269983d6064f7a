"""TranslatedChat: a request of another API, written as a chat request."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ChatRequest

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedChat:
    """A body for the chat endpoint, and the names that its fields have in the client's own request."""

    document: dict[str, Any]
    sources: tuple[str, ...]  # for each message, the part of the client's request from which the message was made
    # (pattern of chat fields, name in the client's request). A pattern that begins with \b also applies to messages.
    names: tuple[tuple[str, str], ...]

    def request(self) -> ChatRequest:
        """Returns the checked chat request. Raises RequestError with the chat's field names."""
        return parse_request(ChatRequest, self.document)

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """A context in which a RequestError gets the field name that the client used."""
        try:
            yield
        except RequestError as error:
            raise self._renamed(error) from error

    def _renamed(self, error: RequestError) -> RequestError:
        message = str(error)
        field = error.field
        if field is not None:
            own = self._own_name(field)
            # Replaces the field only where it is a whole word: in a message about `stop`, `stop_token_ids` stays as it
            # is.
            message = re.sub(rf"(?<!\w){re.escape(field)}(?!\w)", lambda _found: own, message)
            field = own
        for pattern, name in self.names:
            if pattern.startswith(r"\b"):
                message = re.sub(pattern, name, message)
        return type(error)(message, field)

    def _own_name(self, field: str) -> str:
        message = _MESSAGE.match(field)
        if message is not None and int(message[1]) < len(self.sources):
            return self.sources[int(message[1])]
        for pattern, name in self.names:
            field = re.sub(pattern, name, field)
        return field
