"""ChoiceReader: reads a choice of an answer as the parts of a message, for all endpoints that answer with messages."""

from __future__ import annotations

from rayloom_engine.front.generation.deltas import ChoiceResult
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parts import MessageParser, MessagePart
from rayloom_engine.text.output_decoder import TextDelta


class ChoiceReader:
    """The state of one choice. For a whole answer use `message`, for a stream `add`, never both."""

    def __init__(self, parser: MessageParser, *, has_forced_call: bool = False) -> None:
        """`has_forced_call`: the request names the function that the model calls."""
        self._parser = parser
        self._has_forced_call = has_forced_call
        self.num_reasoning_tokens = 0  # tokens of the choice so far that belong to its reasoning

    def add(self, delta: TextDelta) -> list[MessagePart]:
        """Returns the parts that are certain after `delta`. The last delta has a finish_reason."""
        parts = self._parser.add(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        return parts

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """Returns OpenAI's finish reason for the sequence's own: "tool_calls" after tool calls that the model chose."""
        if finish_reason == "stop" and self._parser.num_tool_calls and not self._has_forced_call:
            return "tool_calls"
        return finish_reason

    def message(self, result: ChoiceResult) -> Message:
        """Returns the message of a whole choice."""
        message = Message()
        delta = TextDelta(
            text=result.text, token_ids=tuple(result.token_ids), logprobs=(), finish_reason=result.finish_reason
        )
        message.add(self.add(delta))
        return message
