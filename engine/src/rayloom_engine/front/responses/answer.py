"""ResponsesAnswer: writes the response object, whole or in the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.json_pieces import lazy_ids
from rayloom_engine.front.openai.answers.cache_usage import num_cache_writes
from rayloom_engine.front.openai.answers.logprobs import LogprobWriter
from rayloom_engine.front.openai.answers.stream import PING
from rayloom_engine.front.openai.chat.call import ChatCall
from rayloom_engine.front.operations.service import Service
from rayloom_engine.front.responses.output_items import OutputItems
from rayloom_engine.front.responses.request import LOGPROBS, ReasoningOptions, ResponsesRequest, TextOptions
from rayloom_engine.text.output_decoder import TextDelta

# Error codes of OpenAI's response object, by HTTP status.
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesAnswer:
    """Implements AnswerWriter: writes the documents of one request."""

    has_event_names = True
    ping = PING
    end = b""
    generation: Generation

    def __init__(self, service: Service, call: ChatCall, request: ResponsesRequest, request_id: str) -> None:
        self.request_id = f"resp_{request_id}"
        self._config = service.config
        self._call = call
        self._request = request
        self._created = int(time.time())
        self._reader = call.reader(self.request_id, 0)
        self._items = OutputItems(request_id)
        self._wants_logprobs = LOGPROBS in (request.include or ())
        self._logprobs = LogprobWriter(call.text.tokenizer, as_ids=False)
        self._num_events = 0
        self._num_tokens = 0  # tokens in all deltas so far
        # log-probabilities of tokens that may belong to the reasoning: where it ends is not known yet
        self._undecided: list[TokenLogprobs] = []
        self._is_cut = False

    def opening(self) -> list[dict[str, Any]]:
        response = self._response("in_progress", [])
        return self._numbered({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def prepare(self) -> None:
        """Does nothing: the constructor makes all that needs no output."""

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        text = delta.text
        parts = self._reader.add(text)
        events = self._items.add(parts, self._answer_logprobs(text))
        if text.finish_reason is not None:
            self._is_cut = text.finish_reason == "length"
            events += self._items.finish(is_cut=self._is_cut)
        return self._numbered(events)

    def text_events(self, index: int) -> None:
        """Returns None: events differ not only in their text, but also in `sequence_number`."""

    def closing(self) -> list[dict[str, Any]]:
        response = self._final(self._items.documents())
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Returns the event with the failed response, then an error event, at which clients raise an exception."""
        details = error.body()["error"]
        response = self._response("failed", self._items.documents())
        response["error"] = {**details, "code": _ERROR_CODES.get(error.status, "server_error")}
        events = [{"type": "response.failed", "response": response}, {**details, "error": details, "type": "error"}]
        return self._numbered(events)

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        result = results[0]
        self._items.add(self._reader.add(result.whole_text))
        self._is_cut = result.finish_reason == "length"
        self._items.finish(is_cut=self._is_cut)
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs.chat(result.logprobs[self._reader.num_reasoning_tokens :])["content"]
        response = self._final(self._items.documents(logprobs))
        if self._request.enable_response_messages:
            response["input_messages"] = [self._raw_message(generation.prompts[0])]
            response["output_messages"] = [self._raw_message(tuple(result.token_ids))]
        return response

    def _answer_logprobs(self, text: TextDelta) -> list[Any]:
        """Returns log-probabilities of the answer's tokens up to this delta that were not returned before.

        Those of the reasoning are left out.
        """
        self._num_tokens += len(text.token_ids)
        if not self._wants_logprobs:
            return []
        self._undecided += text.logprobs
        if self._reader.is_counting:
            return []
        first = self._num_tokens - len(self._undecided)
        entries = self._undecided[max(0, self._reader.num_reasoning_tokens - first) :]
        self._undecided = []
        return self._logprobs.chat_entries(entries)

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._num_events})
            self._num_events += 1
        return numbered

    def _final(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        response = self._response("incomplete" if self._is_cut else "completed", output)
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage()
        if self.generation.warnings:
            response["warnings"] = list(self.generation.warnings)
        return response

    def _usage(self) -> dict[str, Any]:
        num_input = self.generation.num_prompt_tokens
        num_output = self.generation.num_output_tokens
        num_cached = self.generation.num_cached_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_cache_writes(self._config, num_input, num_cached),
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        text = request.text or TextOptions()
        reasoning = request.reasoning or ReasoningOptions()
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model or self._config.api_model_name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self._call.params.temperature,
            "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._call.params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
        }

    def _raw_message(self, token_ids: tuple[int, ...]) -> dict[str, Any]:
        text = self._call.text.tokenizer.decode(token_ids, skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": lazy_ids(token_ids)}
