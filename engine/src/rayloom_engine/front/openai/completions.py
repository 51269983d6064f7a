"""POST /v1/completions: one or several prompts, as text or as token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.core.embeds import embeds_of
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.generation.admission import check_num_choices
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.json_pieces import LazyList, lazy_ids
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.answers.answer import Answer, answer, request_id_of
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate
from rayloom_engine.front.openai.answers.logprobs import LogprobWriter
from rayloom_engine.front.openai.answers.stream import Event
from rayloom_engine.front.openai.answers.text_events import UnparsedTextEvents
from rayloom_engine.front.openai.embeds.field import embedded_prompt, saved_tensors
from rayloom_engine.front.openai.fields.request_reading import read_request
from rayloom_engine.front.openai.fields.wire import CompletionRequest
from rayloom_engine.front.openai.prompts import DECODE_IN_THREAD_ABOVE_TOKENS, parse_prompts, text_prompt
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import check_token_ids
from rayloom_engine.text.tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    service, text, wire = await read_request(request, CompletionRequest)
    params = wire.sampling(text.defaults)
    saved = saved_tensors(wire, service, text.model)
    given = [] if saved and wire.prompt in (None, "", []) else parse_prompts(wire.prompt)
    # Check the number of prompts before tokenising any of them.
    check_num_choices(service.config, (len(saved) + len(given)) * params.n, request.state.tenant)
    add_special_tokens = wire.add_special_tokens is not False
    prompts: list[tuple[int, ...]] = [await embedded_prompt(each, wire, params, text.model) for each in saved]
    saved.clear()
    for number, prompt in enumerate(given):
        if isinstance(prompt, str):
            ids = await text_prompt(text, prompt, add_special_tokens=add_special_tokens)
        else:
            ids = prompt
        kept = tuple(wire.cut_prompt(ids, params, text.model.max_model_len))
        if len(kept) < len(ids):
            given[number] = ids = kept  # also if the prompt was a text: the echo has only the tokens that remain
        params.check_room(len(ids), text.model.max_model_len)
        check_token_ids(ids, text.model.vocab_size)
        prompts.append(ids)
        await asyncio.sleep(0)  # lets other requests run: a request may have a thousand prompts
    echoes = []
    for prompt, ids in zip(given, prompts, strict=True) if wire.echo else ():
        if len(ids) > DECODE_IN_THREAD_ABOVE_TOKENS:
            echoes.append(await asyncio.to_thread(_echo, text.tokenizer, prompt, ids))
        else:
            echoes.append(_echo(text.tokenizer, prompt, ids))
            await asyncio.sleep(0)
    writer = CompletionAnswer(service, text, wire, request_id_of(request, wire), echoes)
    return await answer(request, service, text, writer, wire, prompts, params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt as it appears in an answer with `echo`."""

    text: str
    num_hidden_chars: int = 0  # length of the special tokens before the prompt; `text` leaves them out


def _echo(tokenizer: Tokenizer, prompt: str | tuple[int, ...], ids: tuple[int, ...]) -> Echo:
    """Returns the echo of a prompt. A text is echoed as given.

    Token ids are decoded with special tokens, as the client gave them.
    """
    if not isinstance(prompt, str):
        return Echo(text=tokenizer.decode(ids, skip_special_tokens=False))
    num_hidden = 0
    for token_id in ids:
        token = tokenizer.token_text(token_id)
        if not tokenizer.is_special(token_id) or prompt.startswith(token):
            break
        num_hidden += len(token)
    return Echo(text=prompt, num_hidden_chars=num_hidden)


class CompletionAnswer(Answer):
    """Writes the documents of the completions endpoint.

    `echoes`: an echo for each prompt; empty unless the request has `echo`.
    """

    id_prefix = "cmpl"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, service: Service, text: ModelText, wire: CompletionRequest, request_id: str, echoes: list[Echo]
    ) -> None:
        super().__init__(service, text, wire, request_id)
        self._echoes = echoes
        self._wants_logprobs = wire.logprobs is not None
        self._wants_prompt_logprobs = wire.prompt_logprobs is not None
        self._logprobs = LogprobWriter(text.tokenizer, as_ids=wire.names_tokens_by_id(service.config))
        self._streams = bool(wire.stream)
        # True if chunks after the first have text alone.
        self._is_plain = not (self._wants_logprobs or self.returns_ids or self.continuous_usage)
        self._offsets: dict[int, int] = {}  # choice index -> offset of the choice's next token in its text

    def chunks(self, delta: ChoiceDelta) -> list[Event]:
        text = delta.text
        if not delta.is_first and self._is_plain and text.finish_reason is None and self.is_chunk_fixed:
            return [self._template(delta.index).filled(text.text)] if text.text else []
        self.count(delta)
        is_echoed = delta.is_first and bool(self._echoes)
        logprobs = None
        if self._wants_logprobs and (text.logprobs or is_echoed):
            logprobs = self._logprobs_of(delta.index, text.token_ids, text.logprobs, delta.prompt_logprobs, is_echoed)
        shown = (self._echo(delta.index).text if is_echoed else "") + text.text
        has_prompt = self._wants_prompt_logprobs and delta.is_first
        is_empty = not shown and logprobs is None and text.finish_reason is None
        if is_empty and not has_prompt and not self.returns_ids:
            return []
        choice = _choice(delta.index, shown)
        choice["logprobs"] = logprobs
        choice["finish_reason"] = text.finish_reason
        choice["stop_reason"] = text.stop_reason
        if self.returns_ids:
            choice["token_ids"] = list(text.token_ids)
            choice["prompt_token_ids"] = self._prompt_ids(delta.index) if delta.is_first else None
        if has_prompt:
            choice["prompt_logprobs"] = self._logprobs.prompt(delta.prompt_logprobs)
        return [self.chunk(choice)]

    def text_events(self, index: int) -> UnparsedTextEvents | None:
        return UnparsedTextEvents(self._template(index)) if self._is_plain and self.is_chunk_fixed else None

    def _template(self, index: int) -> ChunkTemplate:
        key = (index, str)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = ChunkTemplate(lambda shown: self.chunk(_choice(index, shown)))
        return template

    def choice(self, generation: Generation, result: ChoiceResult) -> dict[str, Any]:
        is_echoed = bool(self._echoes)
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs_of(
                result.index, result.token_ids, result.logprobs, result.prompt_logprobs, is_echoed
            )
        return {
            "index": result.index,
            "text": (self._echo(result.index).text if is_echoed else "") + result.text,
            "logprobs": logprobs,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "prompt_logprobs": self._logprobs.prompt(result.prompt_logprobs) if self._wants_prompt_logprobs else None,
            "token_ids": lazy_ids(result.token_ids) if self.returns_ids else None,
            "prompt_token_ids": self._prompt_ids(result.index) if self.returns_ids else None,
        }

    def _logprobs_of(
        self,
        index: int,
        token_ids: list[int] | tuple[int, ...],
        entries: list[TokenLogprobs] | tuple[TokenLogprobs, ...],
        prompt_entries: tuple[TokenLogprobs, ...],
        is_echoed: bool,
    ) -> dict[str, Any]:
        all_ids = list(token_ids)
        all_entries = [*entries]
        with_prompt: list[TokenLogprobs | None] = list(all_entries)
        if is_echoed:
            all_ids = [*self._prompt(index), *all_ids]
            with_prompt = [None, *prompt_entries, *all_entries]
            self._offsets[index] = -self._echo(index).num_hidden_chars
        offset = self._offsets.get(index, 0)
        if self._streams:
            self._offsets[index] = offset + self._logprobs.num_chars(all_ids)
        return self._logprobs.completion(all_ids, with_prompt, offset)

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self.generation.prompts[index // self.generation.params.n]

    def _prompt_ids(self, index: int) -> list[Any] | LazyList | None:
        """Returns the token ids of the choice's prompt for JSON; None if the prompt has embeddings instead."""
        prompt = self._prompt(index)
        return None if embeds_of(prompt) else lazy_ids(prompt)

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self.generation.params.n]


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
