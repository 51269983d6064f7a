"""Answer: turns a checked request into its response. The same code serves chat and completions, streaming or not."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayloom_engine.front.generation.admission import check_num_allowed_ids, check_num_prompt_logprobs
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation, continuation_headers, watch_client
from rayloom_engine.front.http import json_pieces
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.json_pieces import LazyList
from rayloom_engine.front.http.tenant import Caller, cache_key
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fingerprint import fingerprint
from rayloom_engine.front.openai.stream import DONE, PING, EventStream, EventWriter
from rayloom_engine.front.openai.wire import GenerationRequest, StreamOptions
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import SamplingParams

PART_BYTES = 64 * 1024  # size of the parts of a large answer; each waits until most earlier ones are sent
WHOLE_BYTES = 1024 * 1024  # a larger answer has no Content-Length


class AnswerWriter(EventWriter, Protocol):
    """Writes the response documents of one request. Set `generation` before the first of them is written."""

    request_id: str
    generation: Generation

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        """Returns the whole document, for a request that does not stream."""


class Answer(ABC):
    """Writes the documents of an endpoint that answers with choices. An AnswerWriter."""

    id_prefix: str
    full_object: str
    chunk_object: str
    has_event_names = False
    ping = PING
    end = DONE
    generation: Generation

    def __init__(self, service: Service, text: ModelText, wire: GenerationRequest, request_id: str) -> None:
        options = wire.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = self.include_usage and bool(options.continuous_usage_stats)
        self.returns_ids = bool(wire.return_token_ids)
        self.request_id = f"{self.id_prefix}-{request_id}"
        self._created = int(time.time())
        self._model = service.config.api_model_name
        self._fingerprint = fingerprint(service.config, text.model)
        self._num_warned = 0  # warnings in chunks so far
        self._num_written = 0  # tokens in all chunks written so far

    @abstractmethod
    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Returns the stream's chunks for one delta."""

    @abstractmethod
    def choice(self, generation: Generation, result: ChoiceResult) -> dict[str, Any]:
        """Returns one choice of the full document."""

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        """Returns the whole document, for a request that does not stream."""
        choices = (self.choice(generation, result) for result in results)
        document = self._head(self.full_object)
        document["choices"] = LazyList(choices, 1) if len(results) > 1 else list(choices)
        document["usage"] = generation.usage(num_reasoning_tokens=self.num_reasoning_tokens)
        if generation.warnings:
            document["warnings"] = list(generation.warnings)
        return document

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of the tokens written so far that belong to the model's reasoning."""
        return 0

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Returns a chunk with one choice. With include_usage it has the key `usage`, as in OpenAI's API."""
        document = {**self._head(self.chunk_object), "choices": [choice]}
        if self.include_usage:
            usage = (
                self.generation.usage(self._num_written, self.num_reasoning_tokens) if self.continuous_usage else None
            )
            document["usage"] = usage
        warnings = self.generation.warnings
        if len(warnings) > self._num_warned:
            document["warnings"] = list(warnings[self._num_warned :])
            self._num_warned = len(warnings)
        return document

    def count(self, delta: ChoiceDelta) -> None:
        """Counts the tokens of `delta` in the usage that chunks report."""
        self._num_written += len(delta.text.token_ids)

    def opening(self) -> list[dict[str, Any]]:
        """Returns no chunk: a stream of choices begins with the first delta."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """Returns the last chunk of a stream with include_usage, which has the usage and no choices."""
        if not self.include_usage:
            return []
        usage = self.generation.usage(num_reasoning_tokens=self.num_reasoning_tokens)
        return [{**self._head(self.chunk_object), "choices": [], "usage": usage}]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Returns the error object as the last chunk."""
        return [error.body()]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }


class WholeAnswer(Response):
    """The answer to a request that does not stream. Owns the generation and the task that watches its client; ends
    both.

    The request counts as in flight until the answer is sent, so a drain also waits for slow clients. A document of more
    than WHOLE_BYTES is sent while it is being encoded; a smaller one has a Content-Length.
    """

    media_type = "application/json"

    def __init__(self, generation: Generation, document: dict[str, Any], watcher: asyncio.Task[None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(continuation_headers(generation))
        self._generation = generation
        self._document = document
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_document(send)
        finally:
            self._watcher.cancel()
            self._generation.close()

    async def _send_document(self, send: Send) -> None:
        num_bytes = 0
        held: list[bytes] = []
        is_begun = False
        for part in json_pieces.parts(self._document, PART_BYTES):
            if self._generation.is_client_gone:
                return  # nobody would read the rest
            num_bytes += len(part)
            held.append(part)
            if num_bytes > WHOLE_BYTES:
                if not is_begun:
                    is_begun = True
                    await self._begin(send)
                await _send_parts(send, held)
                held = []
            await asyncio.sleep(0)  # let other requests run before the next part is encoded
        if not is_begun:
            self.headers["content-length"] = str(num_bytes)
            await self._begin(send)
        await _send_parts(send, held)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._generation.answered()

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _send_parts(send: Send, parts: list[bytes]) -> None:
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def answer(
    request: Request,
    service: Service,
    text: ModelText,
    writer: AnswerWriter,
    wire: GenerationRequest,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
) -> Response:
    """Generates and returns the response. Raises the errors that happen before the response begins."""
    params = text.defaults.with_length(params, prompts, text.model.max_model_len, service.config.max_output_tokens)
    wire.check_priority(service.config.enable_priority)
    check_num_prompt_logprobs(prompts, params)
    check_num_allowed_ids(len(prompts), params)
    service.lifecycle.check_accepts()  # a drain may have begun while the body was read
    tenant: str = request.state.tenant
    prefixes = cache_key(request.state.owner, wire.cache_salt)
    generation = await Generation.start(
        service,
        text,
        # Clients may reuse an id, but the engine needs a unique one.
        request_id=f"{writer.request_id}-{secrets.token_hex(8)}",
        prompts=prompts,
        params=params,
        caller=Caller(tenant=tenant, priority=wire.priority or 0, cache_key=prefixes),
        fresh_seed=secrets.randbits(63),
    )
    writer.generation = generation
    watcher = watch_client(request.receive, generation)
    is_handed_over = False
    try:
        if not wire.stream:
            document = writer.full(generation, await generation.collect())
            is_handed_over = True
            return WholeAnswer(generation, document, watcher)
        deltas = generation.deltas(service.waits.ping_s, service.waits.accept_s)
        first = await anext(deltas)
        generation.accept()
        is_handed_over = True
        return EventStream(
            generation,
            deltas,
            first,
            writer,
            watcher,
        )
    finally:
        if not is_handed_over:
            watcher.cancel()
            generation.close()


def request_id_of(request: Request, wire: GenerationRequest) -> str:
    """Returns the request's id: the field `request_id`, else the X-Request-Id header, else the id that Gate made.

    The response carries it as X-Request-Id. If the client sent that header, the response returns the header's value
    instead.
    """
    http_id: str = request.state.request_id
    if wire.request_id is None:
        return http_id
    if request.headers.get("x-request-id") != http_id:
        request.state.request_id = wire.request_id
    return wire.request_id
