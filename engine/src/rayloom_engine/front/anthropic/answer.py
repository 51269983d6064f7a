"""MessagesAnswer: writes the message object, whole or in the events of a stream."""

from __future__ import annotations

from typing import Any

from rayloom_engine.front.anthropic.content_blocks import ContentBlocks
from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.openai.answers.cache_usage import num_cache_writes
from rayloom_engine.front.operations.service import Service


class MessagesAnswer:
    """Implements AnswerWriter: writes the documents of one request."""

    has_event_names = True
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    end = b""
    generation: Generation

    def __init__(self, service: Service, reader: ChoiceReader, model: str | None, request_id: str) -> None:
        """`model`: the name that the client used, perhaps an alias."""
        self.request_id = f"msg_{request_id}"
        self._config = service.config
        self._model = model or service.config.api_model_name
        self._reader = reader
        self._blocks = ContentBlocks()
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> list[dict[str, Any]]:
        """Returns the message without content. `input_tokens` counts the whole prompt: the number of cached tokens is
        not known yet."""
        usage = {"input_tokens": self.generation.num_prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], usage)}]

    def prepare(self) -> None:
        """Does nothing: the constructor makes all that needs no output."""

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        events = self._blocks.add(self._reader.add(delta.text))
        if delta.text.finish_reason is not None:
            events += self._blocks.finish()
            self._stop = self._stopped(delta.text.finish_reason, delta.text.stop_reason)
        return events

    def text_events(self, index: int) -> None:
        """Returns None: events of Messages have names, which a ChunkTemplate does not write."""

    def closing(self) -> list[dict[str, Any]]:
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.anthropic_body()]

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        result = results[0]
        self._blocks.add(self._reader.add(result.whole_text))
        self._blocks.finish()
        self._stop = self._stopped(result.finish_reason, result.stop_reason)
        return self._message(self._blocks.documents(), self._usage())

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop,
            "usage": usage,
        }

    def _stopped(self, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        """Returns `stop_reason` and `stop_sequence`. An incomplete tool call does not count as "tool_use"."""
        if finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._blocks.has_whole_call:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Returns Anthropic's usage: the three numbers of input tokens add up to the prompt's length."""
        num_prompt = self.generation.num_prompt_tokens
        num_read = self.generation.num_cached_tokens
        num_written = num_cache_writes(self._config, num_prompt, num_read)
        return {
            "input_tokens": num_prompt - num_read - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_read,
            "output_tokens": self.generation.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens},
        }
