"""Generation: the sequences of one HTTP request, from submission to the last delta.

Choices are ordered by prompt: choice index = prompt index x n + number of the choice within its prompt. The index is
also the lane in the mailbox.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from rayloom_engine.core.embeds import embeds_of
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.core_link.request_mailbox import Items, Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence, Place
from rayloom_engine.front.generation.admission import check_embeds_room, check_num_choices, check_room
from rayloom_engine.front.generation.deltas import ChoiceDelta, ChoiceResult
from rayloom_engine.front.generation.lane import Lane
from rayloom_engine.front.generation.sink import DeltaSink
from rayloom_engine.front.generation.sink_feed import SinkFeed
from rayloom_engine.front.http.errors import ClientGone
from rayloom_engine.front.http.tenant import Caller
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.operations.service import Service
from rayloom_engine.protocol.messages import SequenceOutput
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.bad_words import bad_word_ids
from rayloom_engine.text.output_decoder import OutputDecoder
from rayloom_engine.text.stop_strings import StopAutomaton

LANES_AT_ONCE = 64  # sequences created or submitted (in 1 ms) before other requests get a turn
TOKENS_AT_ONCE = 65536  # prompt tokens submitted before other requests get a turn
ROUNDED = "another engine, whose results may differ by rounding, computed a part of this answer"


class Generation:
    """A request in flight, from `start` until `close`. For one handler."""

    def __init__(
        self,
        service: Service,
        *,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        caller: Caller,
    ) -> None:
        """Use `start` instead: it also makes the sequences and submits them."""
        self.request_id = request_id
        self.prompts = tuple(prompts)
        self.params = params
        self._service = service
        self._metrics = service.metrics
        self.caller = caller
        self._mailbox = Mailbox()
        self._early: dict[int, list[SequenceOutput]] = {}  # choice -> outputs held until the prompt's logprobs come
        self._is_closed = False
        self.is_client_gone = False
        self.has_failed = False  # the answer has begun and ended in an error
        self._is_silent = True  # no choice has a token yet
        self._started_s = time.monotonic()
        self.num_cached_tokens = 0
        self._form_warnings: tuple[str, ...] = ()  # parts of the answer's form that cannot be enforced
        self.is_rounded = False  # engines whose results differ by rounding computed parts of the answer
        self._lanes: list[Lane] = []
        self._unfinished: set[int] = set()
        self._has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._feed: SinkFeed | None = None  # gives small deltas to a sink; `deltas` then does not yield them
        self._is_submitted = False

    @classmethod
    async def start(
        cls,
        service: Service,
        text: ModelText,
        *,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        caller: Caller,
        fresh_seed: int,
    ) -> Generation:
        """Submits every sequence of a request to the core, in parts, so that other requests get a turn in between.

        Raises RequestError if the request can never be served, and QueueFull if there is no room for it now.
        """
        generation = cls(service, request_id=request_id, prompts=prompts, params=params, caller=caller)
        num_choices = generation.num_choices
        check_num_choices(service.config, num_choices, caller.tenant)
        generation._check_room()
        service.lifecycle.enter()  # before the form is checked, so that a drain waits for the check
        try:
            form = params.structured_outputs
            if form is not None:
                generation._form_warnings = await service.form_checks.check(params.grammar, form.field, caller.tenant)
                generation._check_room()  # other requests may have come
            # Make all lanes before submitting: outputs may arrive as soon as the first part is submitted.
            generation._lanes = [lane async for lane in generation._make_lanes(text, fresh_seed)]
            generation._unfinished = set(range(num_choices))
            check_embeds_room(service.client, generation.prompts, caller.tenant)  # other requests may have come
            await generation.submit([lane.sequence for lane in generation._lanes])
            generation.observe_start(generation._lanes[0].sequence.params.max_tokens)
        except BaseException:
            generation.close()  # the handler has no Generation yet, and so cannot close it
            raise
        return generation

    def _check_room(self) -> None:
        """Raises QueueFull if there is no room for the request now."""
        client, tenant = self._service.client, self.caller.tenant
        check_room(self._service.config, client, self.num_choices, tenant)
        check_embeds_room(client, self.prompts, tenant)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(lane.decoder.num_tokens for lane in self._lanes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the client: parts of the form that are not enforced, and engines that differ by rounding."""
        return (*self._form_warnings, ROUNDED) if self.is_rounded else self._form_warnings

    @property
    def is_finished(self) -> bool:
        """True if every choice is finished."""
        return not self._unfinished

    def held_s(self) -> float:
        """Returns the seconds for which the request waited for an engine that could take it, before its first token."""
        now_s = time.monotonic()
        return max((lane.sequence.held_s(now_s) for lane in self._lanes), default=0.0)

    def usage(self, num_output_tokens: int | None = None, num_reasoning_tokens: int = 0) -> dict[str, Any]:
        """Returns OpenAI's usage object. `num_output_tokens`: number of output tokens to state; None: all so far."""
        num_output = self.num_output_tokens if num_output_tokens is None else num_output_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": self.num_prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": num_reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    async def deltas(self, wait_s: float, first_wait_s: float | None = None) -> AsyncIterator[list[ChoiceDelta]]:
        """Yields lists of deltas until every choice is finished; an empty list if nothing arrives for `wait_s`.

        `first_wait_s` replaces `wait_s` for the first list. After `feed_into`, small deltas go to the sink and are not
        yielded. Raises the error that ended the request: QueueFull, RequestError, EngineDead or ClientGone.
        """
        this_wait_s = wait_s if first_wait_s is None else first_wait_s
        while self._unfinished:
            items = await self._mailbox.take(this_wait_s, None if self._feed is None else self._feed.read)
            if items or self._unfinished:
                yield self.decode(items, time.monotonic())
            this_wait_s = wait_s

    def feed_into(self, sink: DeltaSink) -> None:
        """Makes later small deltas go to `sink`. Deltas with log-probabilities, which may be long, never do."""
        if not self._has_logprobs:
            self._feed = SinkFeed(sink, self, self._lanes, self._mailbox, self._metrics, self._started_s)

    async def collect(self) -> list[ChoiceResult]:
        """Returns all choices once they are finished. Raises as `deltas` does."""
        results = [ChoiceResult(index=index) for index in range(self.num_choices)]
        async for deltas in self.deltas(wait_s=3600.0):
            for delta in deltas:
                results[delta.index].add(delta)
        return results

    def accept(self) -> None:
        """Marks the sequences as accepted: a full queue can no longer refuse them.

        Call it before a stream's status line is sent. If the request has failed already, raises its failure, even if
        some of its outputs were taken before.
        """
        if self._unfinished and self._mailbox.failure is not None:
            raise self._mailbox.failure
        for lane in self._lanes:
            lane.sequence.is_accepted = True

    def client_gone(self) -> None:
        """Frees the request's resources at once. The handler's next call raises ClientGone."""
        self.is_client_gone = True
        self._abort_unfinished()
        self._mailbox.fail(ClientGone())

    def answered(self) -> None:
        """Counts the request as finished, because the whole answer was sent."""
        if not self.is_client_gone:
            self._metrics.finished.add(1)

    def failed(self, error: Exception) -> None:
        """Counts the request as failed: its answer had begun, then ended in `error`."""
        self.has_failed = True
        self._metrics.observe_failure(error)

    def close(self) -> None:
        """Aborts unfinished sequences. May be called several times."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abort_unfinished()
        self._service.lifecycle.leave()
        if self._is_submitted and not self._unfinished:
            self._metrics.request_s.observe(time.monotonic() - self._started_s)

    def observe_start(self, max_tokens: int) -> None:
        """Counts the request in the metrics. `max_tokens`: the limit of each choice."""
        self._is_submitted = True
        metrics = self._metrics
        metrics.prompt_tokens.add(self.num_prompt_tokens)
        metrics.request_n.observe(self.params.n)
        metrics.request_max_tokens.observe(max_tokens, self.num_choices)
        for prompt in self.prompts:
            metrics.request_prompt_tokens.observe(len(prompt))

    async def _make_lanes(self, text: ModelText, fresh_seed: int) -> AsyncIterator[Lane]:
        model = text.model
        arrival = time.time()
        stops = StopAutomaton(self.params.stop_strings)
        bad_words = bad_word_ids(text.tokenizer, self.params.bad_word_strings)
        lane = 0
        for prompt in self.prompts:
            decoding = self.params.decoding(
                0,
                len(prompt),
                text.context_of(self.params, len(prompt)),
                model.vocab_size,
                fresh_seed,
                max_output_tokens=self._service.config.max_output_tokens,
            )
            known_ids = () if embeds_of(prompt) else prompt  # placeholders of embeddings are no text
            leader: str | None = None
            for choice in range(self.params.n):
                sequence = ClientSequence(
                    sequence_id=f"{self.request_id}-{lane}",
                    request_id=self.request_id,
                    lane=lane,
                    mailbox=self._mailbox,
                    place=Place(fingerprint=model.fingerprint, waits_since_s=self.caller.waits_since_s),
                    prompt_ids=prompt,
                    params=msgspec.structs.replace(
                        decoding,
                        seed=self.params.seed_of(choice, fresh_seed),
                        bad_words=bad_words,
                        adapter=self.caller.adapter,
                        # Only the first choice of a prompt computes the prompt's logprobs; the others share them.
                        prompt_logprobs=decoding.prompt_logprobs if leader is None else None,
                    ),
                    priority=self.caller.priority,
                    arrival=arrival,
                    fork_of=leader,
                    tenant=self.caller.tenant,
                    cache_key=self.caller.cache_key,
                )
                leader = leader or sequence.sequence_id
                yield Lane(
                    sequence=sequence,
                    decoder=OutputDecoder(
                        text.tokenizer, self.params, model.eos_token_ids, known_ids, stops, text.kept_ids
                    ),
                )
                lane += 1
            if lane % LANES_AT_ONCE < self.params.n:
                await asyncio.sleep(0)

    async def submit(self, sequences: Sequence[ClientSequence], *, is_accepted: bool = False) -> None:
        """Submits sequences of this request in parts of at most TOKENS_AT_ONCE prompt tokens.

        Other requests get a turn in between. If this request fails meanwhile, raises its failure and does not submit
        the other parts. A prompt is sent once, and counted once, for all its choices in a part. `is_accepted`: a full
        queue must not refuse the sequences.
        """
        part: list[ClientSequence] = []
        num_tokens = 0
        for sequence in sequences:
            prompt_ids = sequence.prompt_ids
            num_new = 0 if part and part[-1].prompt_ids is prompt_ids else len(prompt_ids)
            if part and (len(part) >= LANES_AT_ONCE or (num_new and num_tokens + num_new > TOKENS_AT_ONCE)):
                self._service.client.submit(part, is_accepted=is_accepted)
                part = []
                num_tokens = 0
                num_new = len(prompt_ids)
                await asyncio.sleep(0)
                if self._mailbox.failure is not None:
                    raise self._mailbox.failure
            part.append(sequence)
            num_tokens += num_new
        if part:
            self._service.client.submit(part, is_accepted=is_accepted)

    def decode(self, items: Items, now_s: float) -> list[ChoiceDelta]:
        """Returns one delta per choice, made from its new outputs and from outputs that were held back until now."""
        if len(items) == 1 and self.params.prompt_logprobs is None:  # the usual case in a stream
            index, output = items[0]
            return [self._delta(index, [output], now_s)] if index in self._unfinished else []
        by_lane, self._early = self._early, {}
        for index, output in items:
            by_lane.setdefault(index, []).append(output)
        deltas = []
        for index in sorted(by_lane):  # the first choice of a prompt comes before the prompt's other choices
            if index not in self._unfinished:
                continue
            if self._has_prompt_logprobs(index):
                deltas.append(self._delta(index, by_lane[index], now_s))
            else:
                self._early[index] = by_lane[index]
        return deltas

    def _leader(self, index: int) -> int:
        """Returns the index of the first choice of the same prompt."""
        return index - index % self.params.n

    def _has_prompt_logprobs(self, index: int) -> bool:
        """False while a choice must wait for the prompt's logprobs, which come with the first choice of the prompt."""
        leader = self._leader(index)
        return self.params.prompt_logprobs is None or leader == index or self._lanes[leader].has_begun

    def _delta(self, index: int, outputs: list[SequenceOutput], now_s: float) -> ChoiceDelta:
        lane = self._lanes[index]
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        is_first = lane.decoder.num_tokens == 0
        if is_first:
            # After a resume the core may send prompt logprobs a second time. Only the first ones are used.
            if index == self._leader(index):
                lane.prompt_logprobs = next(
                    (output.prompt_logprobs for output in outputs if output.prompt_logprobs), ()
                )
                self.num_cached_tokens += outputs[0].num_cached_tokens
            lane.queue_s = outputs[0].queue_s
            prompt_logprobs = self._lanes[self._leader(index)].prompt_logprobs
        if lane.sequence.place.is_rounded and not self.is_rounded:
            self.is_rounded = True
            for each in self._lanes:
                each.events = None  # the next event of any choice has the warning
        num_before = lane.decoder.num_tokens
        delta = lane.decode(outputs)
        num_tokens = lane.decoder.num_tokens - num_before
        if num_tokens:
            if self._is_silent:
                self._is_silent = False
                self._metrics.request_first_token_s.observe(now_s - self._started_s)
            lane.observe(self._metrics, num_tokens, now_s, self._started_s)
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
            # The core knows no stop strings, so it may still compute the sequence.
            self._service.client.abort(lane.sequence.sequence_id, is_complete=True)
            self._metrics.success.add(1, finished_reason=delta.finish_reason)
            self._metrics.request_output_tokens.observe(lane.decoder.num_tokens)
            lane.observe_phases(self._metrics, now_s)
        return ChoiceDelta(index=index, text=delta, is_first=is_first, prompt_logprobs=prompt_logprobs)

    def _abort_unfinished(self) -> None:
        for index in self._unfinished:
            self._service.client.abort(self._lanes[index].sequence.sequence_id)
