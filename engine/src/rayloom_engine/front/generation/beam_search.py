"""BeamSearch: a request whose choices are the best answers that a beam search finds.

Each step submits every live beam as a sequence that generates one token, with log-probabilities of the most likely
tokens. For the core, these are ordinary sequences. Most of their tokens are in the prefix cache. After a crash of the
core, the front submits the sequences of the step again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.errors import RequestError
from rayloom_engine.front.core_link.sequences import ClientSequence, Place
from rayloom_engine.front.generation.admission import check_num_choices, check_room
from rayloom_engine.front.generation.beams import Beam, BeamSettings, PromptSearch
from rayloom_engine.front.generation.deltas import ChoiceDelta
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.errors import ClientGone
from rayloom_engine.front.http.tenant import Caller
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.operations.service import Service
from rayloom_engine.protocol.fingerprint import Fingerprint, continuation
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.output_decoder import OutputDecoder

# Limit for the tokens of all live beams together. Every step sends these tokens to the core again. A million tokens
# take 0.12 s of the core's main thread in each step, most of it for the hashes of their blocks.
MAX_BEAM_TOKENS = 2**20

# Settings that would change the log-probabilities or the text, each with the values that have no effect.
_EXCLUDED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "stop": ((),),
    "bad_words": ((),),
    "allowed_token_ids": (None,),
    "logprob_token_ids": ((),),
    "prompt_logprobs": (None,),
    "thinking_token_budget": (None, -1),
}


def check_beam_search(params: SamplingParams) -> None:
    """Raises RequestError for settings that cannot be combined with a beam search."""
    if params.structured_outputs is not None:
        name = params.structured_outputs.field
        raise RequestError(f"{name} cannot be combined with use_beam_search; leave one of them out", name)
    for name, neutral in _EXCLUDED.items():
        if getattr(params, name) not in neutral:
            asked = " (echo with logprobs asks for them, too)" if name == "prompt_logprobs" else ""
            raise RequestError(f"{name}{asked} cannot be combined with use_beam_search; leave one of them out", name)
    if params.max_tokens == 0:
        raise RequestError("max_tokens must be at least 1 with use_beam_search, given 0", "max_tokens")


class BeamSearch(Generation):
    """A search for the best answers to each prompt, from `search` until `close`."""

    def __init__(self, service: Service, text: ModelText, **settings: Any) -> None:
        """Use `search` instead. `settings`: the arguments of Generation."""
        super().__init__(service, **settings)
        self._text = text
        self._arrival = time.time()
        self._searches: list[PromptSearch] = []
        self._running: dict[int, ClientSequence] = {}  # lane -> unfinished sequence of this step
        self._num_steps = 0
        self._is_accepted = False
        self._num_output_tokens = 0
        self._held_s = 0.0
        self._engine: Fingerprint | None = None  # fingerprint of the engine that computed the last beam

    @classmethod
    async def search(
        cls,
        service: Service,
        text: ModelText,
        *,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        caller: Caller,
        length_penalty: float,
    ) -> BeamSearch:
        """Begins a search. `params.n` is the number of beams and of answers.

        Raises RequestError if the request can never be served, and QueueFull if there is no room for it now.
        """
        check_beam_search(params)
        search = cls(service, text, request_id=request_id, prompts=prompts, params=params, caller=caller)
        check_num_choices(service.config, search.num_choices, caller.tenant)
        check_room(service.config, service.client, search.num_choices, caller.tenant)
        settings = [search._settings(prompt, length_penalty) for prompt in search.prompts]
        _check_num_tokens(params.n, search.num_prompt_tokens, [each.max_tokens for each in settings])
        search._searches = [
            PromptSearch(settings=each, prompt_len=len(prompt))
            for each, prompt in zip(settings, search.prompts, strict=True)
        ]
        search._unfinished = set(range(search.num_choices))
        service.lifecycle.enter()
        search.observe_start(settings[0].max_tokens)
        return search

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens

    def held_s(self) -> float:
        now_s = time.monotonic()
        return max([self._held_s, *(each.held_s(now_s) for each in self._running.values())])

    def accept(self) -> None:
        if self._unfinished and self._mailbox.failure is not None:
            raise self._mailbox.failure
        self._is_accepted = True
        for sequence in self._running.values():
            sequence.is_accepted = True

    async def deltas(self, wait_s: float, first_wait_s: float | None = None) -> AsyncIterator[list[ChoiceDelta]]:
        """Yields empty lists during the search, one every `wait_s`, and then each choice as a single delta."""
        until_s = time.monotonic() + (wait_s if first_wait_s is None else first_wait_s)
        while any(each.is_open for each in self._searches):
            entries = await self._begin_step()
            while self._running:
                self._take(await self._mailbox.take(max(0.0, until_s - time.monotonic())), entries)
                if time.monotonic() >= until_s:
                    yield []
                    until_s = time.monotonic() + wait_s
            if self._mailbox.failure is not None:
                raise self._mailbox.failure  # some beams may have no result
            await self._end_step(entries)
        for number, search in enumerate(self._searches):
            for choice, beam in enumerate(search.answers()):
                yield [self._delta_of(number * self.params.n + choice, beam, self.prompts[number])]
                await asyncio.sleep(0)  # Decoding an answer takes 3 ms, so other requests run before the next one.
                if self.is_client_gone:
                    raise ClientGone()

    def _settings(self, prompt: tuple[int, ...], length_penalty: float) -> BeamSettings:
        model = self._text.model
        most = self._service.config.max_output_tokens
        context = self._text.context_of(self.params, len(prompt))
        decoding = self.params.decoding(0, len(prompt), context, model.vocab_size, 0, max_output_tokens=most)
        stop_ids: Collection[int] = () if self.params.ignore_eos else model.eos_token_ids
        return BeamSettings(
            width=self.params.n,
            max_tokens=decoding.max_tokens,
            min_tokens=self.params.min_tokens,
            stop_ids=frozenset((*stop_ids, *decoding.stop_token_ids)),
            length_penalty=length_penalty,
            num_top=decoding.logprobs,
        )

    async def _begin_step(self) -> dict[int, TokenLogprobs | None]:
        """Submits a sequence for each live beam of the open searches.

        Returns the dict for the results: lane -> None until the lane's result arrives.
        """
        prompts = [
            (*prompt, *beam.token_ids)
            for prompt, search in zip(self.prompts, self._searches, strict=True)
            if search.is_open
            for beam in search.live
        ]
        most = max(max(each.settings.num_alternatives, each.settings.num_top or 0) for each in self._searches)
        params = DecodingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=min(most, self._text.model.vocab_size),
            adapter=self.caller.adapter,
        )
        waits_since_s = self.caller.waits_since_s if self._num_steps == 0 else None
        sequences = [
            ClientSequence(
                sequence_id=f"{self.request_id}-{self._num_steps}-{lane}",
                request_id=self.request_id,
                lane=lane,
                mailbox=self._mailbox,
                place=Place(fingerprint=self._text.model.fingerprint, waits_since_s=waits_since_s),
                prompt_ids=prompt,
                params=params,
                priority=self.caller.priority,
                arrival=self._arrival,
                tenant=self.caller.tenant,
                cache_key=self.caller.cache_key,
            )
            for lane, prompt in enumerate(prompts)
        ]
        self._running = {sequence.lane: sequence for sequence in sequences}
        # A full queue must not end a search that has begun, so the sequences of later steps count as accepted.
        await self.submit(sequences, is_accepted=self._is_accepted or self._num_steps > 0)
        self._num_steps += 1
        return dict.fromkeys(self._running)

    def _take(self, items: list[Any], entries: dict[int, TokenLogprobs | None]) -> None:
        for lane, output in items:
            if lane in self._running and output.logprobs:
                entries[lane] = output.logprobs[0]
                place = self._running.pop(lane).place
                self._held_s = max(self._held_s, place.held_s)
                self._note_engine(place.fingerprint)
                if self._num_steps == 1:
                    self.num_cached_tokens += output.num_cached_tokens

    def _note_engine(self, later: Fingerprint | None) -> None:
        """Notes the fingerprint of the engine that has computed a beam. Several engines may compute the beams."""
        if self._engine is not None and continuation(self._engine, later) == "rounding":
            self.is_rounded = True
        self._engine = later

    async def _end_step(self, entries: dict[int, TokenLogprobs | None]) -> None:
        found = [entry for entry in entries.values() if entry is not None]
        position = 0
        for search in self._searches:
            if search.is_open:
                num_live = len(search.live)
                search.advance(found[position : position + num_live])
                position += num_live
                # Lets other requests run before the next search's step: a wide step takes 0.05 s.
                await asyncio.sleep(0)

    def _delta_of(self, index: int, beam: Beam, prompt: tuple[int, ...]) -> ChoiceDelta:
        decoder = OutputDecoder(
            self._text.tokenizer, self.params, self._text.model.eos_token_ids, prompt, None, self._text.kept_ids
        )
        reason = "length" if beam.stop_id is None else "stop"
        delta = decoder.add(beam.token_ids, beam.entries, reason, beam.stop_id)
        self._num_output_tokens += len(beam.token_ids)
        self._unfinished.discard(index)
        self._observe_choice(len(beam.token_ids), reason)
        return ChoiceDelta(index=index, text=delta, is_first=True)

    def _observe_choice(self, num_tokens: int, reason: str) -> None:
        metrics = self._service.metrics
        seconds = time.monotonic() - self._started_s
        if self._is_silent:
            self._is_silent = False
            metrics.request_first_token_s.observe(seconds)
        metrics.first_token_s.observe(seconds)
        metrics.generation_tokens.add(num_tokens)
        metrics.success.add(1, finished_reason=reason)
        metrics.request_output_tokens.observe(num_tokens)

    def _abort_unfinished(self) -> None:
        for sequence in self._running.values():
            self._service.client.abort(sequence.sequence_id)
        self._running = {}


def _check_num_tokens(width: int, num_prompt_tokens: int, max_tokens: Sequence[int]) -> None:
    """Raises RequestError if the beams of all prompts could have more than MAX_BEAM_TOKENS together."""
    num_tokens = width * (num_prompt_tokens + sum(max_tokens))
    if num_tokens > MAX_BEAM_TOKENS:
        raise RequestError(
            f"the beams could have {num_tokens} tokens together (n {width} x {num_prompt_tokens} tokens of prompts and "
            f"{sum(max_tokens)} of answers), at most {MAX_BEAM_TOKENS} are allowed; lower n or max_tokens, or send "
            "fewer or shorter prompts",
            "n",
        )
