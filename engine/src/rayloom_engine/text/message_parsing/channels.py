"""Reads messages in the harmony format of gpt-oss: a header before each message names its channel and its recipient.

<|channel|>analysis<|message|>They ask for the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>
"""

from __future__ import annotations

import re

from rayloom_engine.text.message_parsing.incoming import IncomingText, Markers, Reading, one_of, until
from rayloom_engine.text.message_parsing.sink import PartSink

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_HEADER_END = Markers((MESSAGE,))
_BODY_END = Markers((END, CALL, RETURN, START))
_FIRST = Markers((START, CHANNEL, MESSAGE))
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
# A recipient may also come before the channel, directly after the role. So it may be the first text of an answer.
_TO = (" to=functions.", "to=functions.")
_FIRST_NAME = re.compile(r"[\w.-]{1,64} ?", re.ASCII)
_MAX_NAME_CHARS = 65


class ChannelReader:
    """Reads all messages of one answer. The channel "analysis" is reasoning; other text without a recipient is content.

    Content and reasoning keep their blanks. A message to anything but a function is reasoning, because it is not for
    the user.
    """

    def __init__(self, incoming: IncomingText, sink: PartSink) -> None:
        self._incoming = incoming
        self._sink = sink
        self.reasoning_end: int | None = None  # position of the first message that is no reasoning, once known

    def read(self) -> Reading[None]:
        recipient = yield from self._read_first_recipient()
        # Text before the first header is content, because the prompt may end with a header.
        marker = CHANNEL if recipient else (yield from until(self._incoming, _FIRST, self._content))
        while marker:
            if marker != MESSAGE:
                header = [recipient]
                recipient = ""
                if not (yield from until(self._incoming, _HEADER_END, header.append)):
                    break
                yield from self._read_body("".join(header))
            else:
                yield from self._read_body("final")
            marker = yield from until(self._incoming, _FIRST, self._content)
        self._sink.end()

    def _read_first_recipient(self) -> Reading[str]:
        """Reads a recipient that continues the role at the end of the prompt, and the tag of the channel behind it.

        Returns them; an empty text, without any effect, if the text does not begin with them.
        """
        incoming = self._incoming
        incoming.mark()
        if found := (yield from one_of(incoming, _TO)):
            limit = incoming.at + _MAX_NAME_CHARS + len(CHANNEL)  # a longer text is content, and must not be held back
            while (end := incoming.text.find(CHANNEL, incoming.at, limit)) < 0:
                if incoming.is_ended or len(incoming.text) >= limit:
                    break
                yield
            if end >= 0 and _FIRST_NAME.fullmatch(incoming.text, incoming.at, end):
                header = found + incoming.text[incoming.at : end] + CHANNEL
                incoming.at = end + len(CHANNEL)
                incoming.release()
                return header
        incoming.rewind()
        return ""

    def _read_body(self, header: str) -> Reading[None]:
        channel = header.rpartition(CHANNEL)[2]
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._end_reasoning()
            self._sink.start(recipient[1])
            emit = self._sink.arguments
        elif channel.strip().startswith("analysis") or "to=" in header:
            emit = self._sink.reasoning
        else:
            emit = self._content
        marker = yield from until(self._incoming, _BODY_END, emit)
        self._sink.drop_blanks()
        if marker == START:
            self._incoming.at -= len(START)

    def _content(self, text: str) -> None:
        if text:
            self._end_reasoning()
        self._sink.content(text)

    def _end_reasoning(self) -> None:
        if self.reasoning_end is None:
            self.reasoning_end = self._incoming.position
