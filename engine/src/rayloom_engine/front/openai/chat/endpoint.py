"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.json_pieces import lazy_ids
from rayloom_engine.front.openai.answers.answer import Answer, answer, request_id_of
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate
from rayloom_engine.front.openai.answers.logprobs import LogprobWriter
from rayloom_engine.front.openai.answers.stream import Event
from rayloom_engine.front.openai.answers.text_events import TextEvents
from rayloom_engine.front.openai.chat.call import ChatCall, prepare_chat
from rayloom_engine.front.openai.chat.message import message_deltas, message_document
from rayloom_engine.front.openai.fields.request_reading import read_request
from rayloom_engine.front.openai.fields.wire import ChatRequest
from rayloom_engine.front.operations.service import Service
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning


async def chat_completions(request: Request) -> Response:
    service, text, wire = await read_request(request, ChatRequest)
    call = await prepare_chat(text, wire)
    writer = ChatAnswer(service, call, wire, request_id_of(request, wire))
    return await answer(request, service, call.text, writer, wire, [call.prompt_ids], call.params)


class ChatAnswer(Answer):
    """Writes the documents of the chat endpoint."""

    id_prefix = "chatcmpl"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, call: ChatCall, wire: ChatRequest, request_id: str) -> None:
        super().__init__(service, call.text, wire, request_id)
        self._wants_logprobs = bool(wire.logprobs)
        self._logprobs = LogprobWriter(call.text.tokenizer, as_ids=wire.names_tokens_by_id(service.config))
        self._echo = wire.echoed()
        self._has_functions = wire.has_functions
        # True if chunks have only parts of the message, without logprobs, token ids or the usage so far.
        self._is_plain = not (self._wants_logprobs or self.returns_ids or self.continuous_usage)
        self._call = call
        self._messages: list[Message] = []  # the choices' messages in an answer that is not streamed

    @functools.cached_property
    def _readers(self) -> list[ChoiceReader]:
        return [self._call.reader(self.request_id, choice) for choice in range(self._call.params.n)]

    def prepare(self) -> None:
        """Also makes the readers of the choices."""
        super().prepare()
        _ = self._readers

    def chunks(self, delta: ChoiceDelta) -> list[Event]:
        if not delta.is_first and self._is_plain and delta.text.finish_reason is None and self.is_chunk_fixed:
            return self._plain_chunks(delta.index, self._readers[delta.index].add(delta.text))
        chunks: list[dict[str, Any]] = []
        if delta.is_first:
            opening: dict[str, Any] = {"index": delta.index, "delta": {"role": "assistant", "content": ""}}
            chunks.append(self.chunk({**opening, "logprobs": None, "finish_reason": None}))
            if self.generation.params.prompt_logprobs is not None and delta.index == 0:
                chunks[0]["prompt_logprobs"] = self._logprobs.prompt(delta.prompt_logprobs)
            if self.returns_ids:
                chunks[0]["prompt_token_ids"] = lazy_ids(self.generation.prompts[0])
            if self._echo:
                echo: dict[str, Any] = {"index": delta.index, "delta": {"content": self._echo}}
                chunks.append(self.chunk({**echo, "logprobs": None, "finish_reason": None}))
        self.count(delta)
        chunks += [self.chunk(choice) for choice in self._choices(delta)]
        return [*chunks]

    def text_events(self, index: int) -> TextEvents | None:
        reader = self._readers[index]
        kind = reader.plain_kind if self._is_plain and self.is_chunk_fixed else None
        if kind is None:
            return None
        return TextEvents(self._templates.get((index, kind)) or self._new_template(index, kind), reader, kind)

    def _plain_chunks(self, index: int, parts: list[MessagePart]) -> list[Event]:
        """Returns chunks that have only parts of the message. Chunks with text alone come from templates."""
        chunks: list[Event] = []
        for part in parts:
            if isinstance(part, (Content, Reasoning)):
                kind = type(part)
                template = self._templates.get((index, kind)) or self._new_template(index, kind)
                chunks.append(template.filled(part.text))
            else:
                deltas = message_deltas([part], is_older=self._has_functions)
                chunks += [self.chunk(_choice(index, delta)) for delta in deltas]
        return chunks

    def _new_template(self, index: int, kind: type[Content | Reasoning]) -> ChunkTemplate:
        template = ChunkTemplate(lambda text: self.chunk(_choice(index, *message_deltas([kind(text)]))))
        self._templates[index, kind] = template
        return template

    def _choices(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Returns the choices of a delta's chunks: a choice for each part of the message.

        Without a part, returns one choice if there are logprobs, token ids or a finish reason to write. The first
        choice has the delta's logprobs and token ids, the last choice has the finish reason.
        """
        text = delta.text
        reader = self._readers[delta.index]
        parts = message_deltas(reader.add(text), is_older=self._has_functions)
        logprobs = self._logprobs.chat(text.logprobs) if self._wants_logprobs and text.logprobs else None
        if not parts:
            if logprobs is None and text.finish_reason is None and not self.returns_ids:
                return []
            parts = [{}]
        choices = [_choice(delta.index, part) for part in parts]
        choices[0]["logprobs"] = logprobs
        if text.finish_reason is not None:
            choices[-1]["finish_reason"] = self._finish_reason(delta.index, text.finish_reason)
            choices[-1]["stop_reason"] = text.stop_reason
        if self.returns_ids:
            for choice in choices:
                choice["token_ids"] = []
            choices[0]["token_ids"] = list(text.token_ids)
        return choices

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        reason = self._readers[index].finish_reason(reason)
        return "function_call" if reason == "tool_calls" and self._has_functions else reason

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(reader.num_reasoning_tokens for reader in self._readers)

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        self._messages = [self._readers[result.index].message(result) for result in results]
        document = super().full(generation, results)
        wants_prompt = generation.params.prompt_logprobs is not None
        document["prompt_logprobs"] = self._logprobs.prompt(results[0].prompt_logprobs) if wants_prompt else None
        document["prompt_token_ids"] = lazy_ids(generation.prompts[0]) if self.returns_ids else None
        return document

    def choice(self, generation: Generation, result: ChoiceResult) -> dict[str, Any]:
        message = message_document(self._messages[result.index], is_older=self._has_functions)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        return {
            "index": result.index,
            "message": message,
            "logprobs": self._logprobs.chat(result.logprobs) if self._wants_logprobs else None,
            "finish_reason": self._finish_reason(result.index, result.finish_reason),
            "stop_reason": result.stop_reason,
            "token_ids": lazy_ids(result.token_ids) if self.returns_ids else None,
        }


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
