"""Server-sent events of OpenAI's streaming API, parsed cheaply, because the client shares the server's cores."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None  # text of a completion
    delta: Delta | None = None  # delta of a chat
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that the server found in its prefix cache; 0 if the answer has no such number."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class StreamEvent(msgspec.Struct, frozen=True):
    """The fields of a chunk that the bench needs. Other fields are skipped without building objects."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None  # an error, of any JSON type, which is printed unchanged

    @property
    def has_new_token(self) -> bool:
        """True if the chunk has a token: a chat delta with text, or a completion with text or without finish reason."""
        for choice in self.choices:
            if choice.delta is not None:
                if choice.delta.content:
                    return True
            elif choice.text or choice.finish_reason is None:
                return True
        return False


_decoder = msgspec.json.Decoder(StreamEvent)


def parse_event(data: bytes) -> StreamEvent:
    """The event in the data of one `data:` line. Raises ValueError unless the data is JSON of a StreamEvent."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"an event that is not a chunk of OpenAI's stream ({error}): {data[:200]!r}") from error


class EventSplitter:
    """Splits a byte stream into the data of its `data:` lines, without comments and other fields.

    Servers of OpenAI's API write each event as one data line, so a line is an event.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every line that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
