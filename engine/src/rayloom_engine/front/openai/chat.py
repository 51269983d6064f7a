"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.http.json_pieces import lazy_ids
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.answer import Answer, answer, check_model, request_id_of
from rayloom_engine.front.openai.logprobs import LogprobWriter
from rayloom_engine.front.openai.parsing import parse_request
from rayloom_engine.front.openai.prompts import chat_prompt
from rayloom_engine.front.openai.wire import ChatRequest
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import check_token_ids


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(ChatRequest, await read_json(request, service.config.max_body_bytes))
    check_model(service, wire.model)
    params = wire.sampling()
    prompt_ids = await chat_prompt(text, wire.messages, wire)
    check_token_ids(prompt_ids, text.model.vocab_size, "messages")
    writer = ChatAnswer(service, text, wire, request_id_of(request, wire))
    return await answer(request, service, text, writer, wire, [tuple(prompt_ids)], params)


class ChatAnswer(Answer):
    """Writes the documents of the chat endpoint."""

    id_prefix = "chatcmpl"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, text: ModelText, wire: ChatRequest, request_id: str) -> None:
        super().__init__(service, text, wire, request_id)
        self._wants_logprobs = bool(wire.logprobs)
        self._logprobs = LogprobWriter(text.tokenizer, as_ids=bool(wire.return_tokens_as_token_ids))

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        chunks = []
        if delta.is_first:
            opening: dict[str, Any] = {"index": delta.index, "delta": {"role": "assistant", "content": ""}}
            chunks.append(self.chunk({**opening, "logprobs": None, "finish_reason": None}))
            if self.returns_ids:
                chunks[0]["prompt_token_ids"] = lazy_ids(self.generation.prompts[0])
        self.count(delta)
        text = delta.text
        logprobs = self._logprobs.chat(text.logprobs) if self._wants_logprobs and text.logprobs else None
        if not text.text and logprobs is None and text.finish_reason is None and not self.returns_ids:
            return chunks
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": text.text} if text.text else {},
            "logprobs": logprobs,
            "finish_reason": text.finish_reason,
        }
        if text.finish_reason is not None:
            choice["stop_reason"] = text.stop_reason
        if self.returns_ids:
            choice["token_ids"] = list(text.token_ids)
        chunks.append(self.chunk(choice))
        return chunks

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        document = super().full(generation, results)
        wants_prompt = generation.params.prompt_logprobs is not None
        document["prompt_logprobs"] = self._logprobs.prompt(results[0].prompt_logprobs) if wants_prompt else None
        document["prompt_token_ids"] = lazy_ids(generation.prompts[0]) if self.returns_ids else None
        return document

    def choice(self, generation: Generation, result: ChoiceResult) -> dict[str, Any]:
        return {
            "index": result.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs.chat(result.logprobs) if self._wants_logprobs else None,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "token_ids": lazy_ids(result.token_ids) if self.returns_ids else None,
        }
