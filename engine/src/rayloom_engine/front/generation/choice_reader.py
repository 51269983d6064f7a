"""ChoiceReader: reads a choice of an answer as the parts of a message, for all endpoints that answer with messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayloom_engine.front.generation.deltas import ChoiceResult
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.parser import TextParser
from rayloom_engine.text.message_parsing.sink import PlainKind
from rayloom_engine.text.message_parts import MessagePart, Reasoning
from rayloom_engine.text.output_decoder import TextDelta


class ChoiceReader:
    """The state of one choice. Use either `message`, for a whole answer, or `add` and `reads`, for a stream."""

    __slots__ = ("_counter", "_has_named_call", "_has_reasoning", "_parser")

    def __init__(
        self,
        parser: TextParser,
        text: ModelText,
        *,
        skips_special_tokens: bool = True,
        has_reasoning: bool = True,
        has_named_call: bool = False,
    ) -> None:
        """`has_reasoning`: the client wants the reasoning. `has_named_call`: the request names the function to call."""
        self._parser = parser
        self._has_reasoning = has_reasoning
        self._has_named_call = has_named_call
        self._counter = ReasoningCounter(text, skips_special_tokens=skips_special_tokens)

    def add(self, delta: TextDelta) -> list[MessagePart]:
        """Returns the parts that are certain after `delta`. The last delta has a finish_reason."""
        parts = self._parser.add(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        if self._counter.is_counting:
            self._counter.add(delta.text, delta.token_ids, self._parser.reasoning_end)
        if self._has_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    @property
    def plain_kind(self) -> PlainKind | None:
        """If text without a tag came now, its part would be of this kind. None if only `add` can read such text."""
        kind = self._parser.plain_kind
        return None if kind is Reasoning and not self._has_reasoning else kind

    @property
    def reads(self) -> Callable[[str, PlainKind], bool]:
        """The function that reads text of an unfinished choice.

        It returns True if `add` would return the text as a single part of the given kind. Otherwise it returns False,
        and the text is not read. While `is_counting`, the caller then calls `count`.
        """
        return self._parser.reads

    @property
    def is_counting(self) -> bool:
        """True while more tokens may belong to the reasoning."""
        return self._counter.is_counting

    def count(self, text: str, token_ids: Sequence[int]) -> None:
        """Counts the reasoning among tokens whose text was read by `reads`."""
        self._counter.add(text, token_ids, self._parser.reasoning_end)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of the choice's tokens so far that belong to its reasoning, including the tags."""
        return self._counter.num_tokens

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """Converts the sequence's finish reason to OpenAI's: "tool_calls" after calls that the model chose."""
        if finish_reason == "stop" and self._parser.num_tool_calls and not self._has_named_call:
            return "tool_calls"
        return finish_reason

    def message(self, result: ChoiceResult) -> Message:
        """Returns the message of a whole choice."""
        message = Message()
        message.add(self.add(result.whole_text))
        return message


class ReasoningCounter:
    """Counts the tokens of the reasoning: all tokens whose text begins before the reasoning ends.

    The count is exact for byte-level vocabularies. The count does not depend on how many tokens each delta has.
    """

    def __init__(self, text: ModelText, *, skips_special_tokens: bool) -> None:
        self._text = text
        self._skips_special_tokens = skips_special_tokens
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self.is_counting = True  # the end of the reasoning is not known yet
        self.num_tokens = 0

    def add(self, text: str, token_ids: Sequence[int], end: int | None) -> None:
        """Counts the tokens of a delta. `end`: number of characters of the reasoning; None while the reasoning
        continues."""
        if not self.is_counting:
            return
        if end == 0:
            self.is_counting = False
            self.num_tokens = 0
            return
        self._pieces.append(text)
        self._token_ids += token_ids
        self.num_tokens = len(self._token_ids)
        if end is None:
            return
        self.is_counting = False
        num_left = len("".join(self._pieces)[:end].encode())
        for count, token_id in enumerate(self._token_ids):
            if num_left <= 0:
                self.num_tokens = count
                return
            num_left -= self._num_bytes(token_id)

    def _num_bytes(self, token_id: int) -> int:
        tokenizer = self._text.tokenizer
        if self._skips_special_tokens and tokenizer.is_special(token_id) and token_id not in self._text.kept_ids:
            return 0
        return len(tokenizer.token_bytes(token_id))
