"""Answer: turns a checked request into its response. The same code serves chat and completions, streaming or not."""

from __future__ import annotations

import functools
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.choice_limits import check_num_allowed_ids
from rayloom_engine.front.generation.admission import check_num_logprobs, check_num_prompt_logprobs
from rayloom_engine.front.generation.beam_search import BeamSearch
from rayloom_engine.front.generation.client_watch import watch_client
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.generation.sink import EventsOfText
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.json_pieces import LazyList
from rayloom_engine.front.http.tenant import Caller, cache_key
from rayloom_engine.front.idempotency.kept_answers import begin_computation, seed_of
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate
from rayloom_engine.front.openai.answers.fingerprint import fingerprint
from rayloom_engine.front.openai.answers.stream import DONE, PING, Event, EventStream, EventWriter
from rayloom_engine.front.openai.answers.whole import WholeAnswer
from rayloom_engine.front.openai.fields.wire import GenerationRequest, StreamOptions
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import SamplingParams


class AnswerWriter(EventWriter, Protocol):
    """Writes the response documents of one request. Set `generation` before the first document is written."""

    request_id: str
    generation: Generation

    def prepare(self) -> None:
        """Does work that needs no output. Called while the engine computes the first token."""

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        """Returns the whole document, for a request that does not stream."""


class Answer(ABC):
    """Implements AnswerWriter for the endpoints that answer with choices."""

    id_prefix: str
    full_object: str
    chunk_object: str
    has_event_names = False
    ping = PING
    end = DONE
    generation: Generation

    def __init__(self, service: Service, text: ModelText, wire: GenerationRequest, request_id: str) -> None:
        options = wire.stream_options or StreamOptions()
        is_forced = service.config.enable_force_include_usage
        self.include_usage = is_forced or bool(options.include_usage)
        self.continuous_usage = is_forced or (self.include_usage and bool(options.continuous_usage_stats))
        self.returns_ids = bool(wire.return_token_ids)
        self.request_id = f"{self.id_prefix}-{request_id}"
        self._created = int(time.time())
        self._model = wire.model or service.config.api_model_name  # the name in the request, perhaps an alias
        self._service, self._text = service, text
        self._is_transferred = wire.kv_transfer_params is not None
        # (choice, kind of text) -> template of the chunks that differ in their text alone
        self._templates: dict[tuple[int, type], ChunkTemplate] = {}
        self._num_warned = 0  # warnings in chunks so far
        self._num_written = 0  # tokens in all chunks written so far

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._service.config, self._text.model, self.generation.caller.adapter)

    def prepare(self) -> None:
        """Computes the fingerprint. An AnswerWriter's method."""
        _ = self._fingerprint

    @abstractmethod
    def chunks(self, delta: ChoiceDelta) -> list[Event]:
        """Returns the stream's chunks for one delta."""

    @abstractmethod
    def text_events(self, index: int) -> EventsOfText | None:
        """Returns the writer of a choice's next events if these differ in their text alone; else None."""

    @abstractmethod
    def choice(self, generation: Generation, result: ChoiceResult) -> dict[str, Any]:
        """Returns one choice of the full document."""

    def full(self, generation: Generation, results: list[ChoiceResult]) -> dict[str, Any]:
        """Returns the whole document, for a request that does not stream."""
        choices = (self.choice(generation, result) for result in results)
        document = self._head(self.full_object)
        document["choices"] = LazyList(choices, 1) if len(results) > 1 else list(choices)
        document["usage"] = generation.usage(num_reasoning_tokens=self.num_reasoning_tokens)
        if self._is_transferred:
            document["kv_transfer_params"] = None  # vLLM's routers expect this key
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

    @property
    def is_chunk_fixed(self) -> bool:
        """True if the next chunk has no new warning. Without usage, such chunks differ only in their choices."""
        return len(self.generation.warnings) == self._num_warned

    def count(self, delta: ChoiceDelta) -> None:
        """Counts the tokens of `delta` in the usage that chunks report."""
        self._num_written += len(delta.text.token_ids)

    def opening(self) -> list[dict[str, Any]]:
        """Returns no chunk: a stream of choices begins with the first delta."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """Returns the last chunk, which has the usage and no choices; without include_usage, returns no chunk."""
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
    context = text.context_of(params, max(map(len, prompts)))
    params = text.defaults.with_length(params, prompts, context, service.config.max_output_tokens)
    wire.check_priority(service.config.enable_priority)
    with wire.own_names():
        params = params.check_logprobs(service.config.max_logprobs, text.model.vocab_size)
        check_num_logprobs(prompts, params, text.model.max_model_len)
    check_num_prompt_logprobs(prompts, params)
    check_num_allowed_ids(len(prompts), params)
    service.lifecycle.check_accepts()  # a drain may have begun while the body was read
    tenant: str = request.state.tenant
    prefixes = cache_key(request.state.owner, wire.cache_salt)
    given: dict[str, Any] = {
        # Clients may reuse an id, but the engine needs a unique id.
        "request_id": f"{writer.request_id}-{secrets.token_hex(8)}",
        "prompts": prompts,
        "params": params,
        "caller": Caller(
            tenant=tenant,
            priority=wire.priority or 0,
            cache_key=prefixes,
            adapter=request.state.adapter,
            waits_since_s=getattr(request.state, "waits_since_s", None),
        ),
    }
    penalty = wire.beam_length_penalty()
    seed = seed_of(request)
    generation = (
        await Generation.start(service, text, fresh_seed=secrets.randbits(63) if seed is None else seed, **given)
        if penalty is None
        else await BeamSearch.search(service, text, length_penalty=penalty, **given)
    )
    writer.generation = generation
    begin_computation(request, generation)
    watcher = watch_client(request.receive, generation)
    is_handed_over = False
    try:
        writer.prepare()
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

    The response carries the id as X-Request-Id. But if the client sent an X-Request-Id, the response repeats the
    client's header.
    """
    http_id: str = request.state.request_id
    if wire.request_id is None:
        return http_id
    if request.headers.get("x-request-id") != http_id:
        request.state.request_id = wire.request_id
    return wire.request_id
