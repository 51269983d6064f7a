"""Lane: one choice of a generation, from its sequence to its text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.front.generation.sink import EventsOfText
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.protocol.messages import SequenceOutput
from rayloom_engine.text.output_decoder import OutputDecoder, TextDelta


@dataclass(slots=True, kw_only=True)
class Lane:
    sequence: ClientSequence
    decoder: OutputDecoder
    made_s: float = field(default_factory=time.monotonic)  # time just before the sequence is submitted
    queue_s: float = 0.0  # seconds for which the sequence waited in the core's queue
    num_preemptions: int = 0
    first_output_s: float | None = None
    last_output_s: float | None = None
    has_begun: bool = False  # an output has arrived
    events: EventsOfText | None = None  # writes this lane's events to a sink; None if events have more than text
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # set only for a prompt's first choice

    def decode(self, outputs: Sequence[SequenceOutput]) -> TextDelta:
        """Returns the text of one or more new outputs."""
        self.has_begun = True
        last = outputs[-1]
        self.num_preemptions = max(self.num_preemptions, last.num_preemptions)
        if len(outputs) == 1:  # the usual case
            return self.decoder.add(last.token_ids, last.logprobs, last.finish_reason, last.stop_token_id)
        return self.decoder.add(
            [token_id for output in outputs for token_id in output.token_ids],
            [entry for output in outputs for entry in output.logprobs],
            last.finish_reason,
            last.stop_token_id,
        )

    def observe(self, metrics: Metrics, num_tokens: int, now_s: float, started_s: float) -> None:
        """Counts new tokens (at least one). Records the time since the lane's last output or the request's start."""
        metrics.generation_tokens.count(num_tokens)
        if self.last_output_s is None:
            self.first_output_s = now_s
            metrics.first_token_s.observe(now_s - started_s)
            if num_tokens > 1:
                metrics.token_gap_s.observe(0.0, num_tokens - 1)
        else:
            metrics.token_gap_s.observe((now_s - self.last_output_s) / num_tokens, num_tokens)
        self.last_output_s = now_s

    def observe_phases(self, metrics: Metrics, now_s: float) -> None:
        """Records the seconds of queue, prefill and decode of a finished choice that had a token."""
        if self.first_output_s is None:
            return
        metrics.observe_phases(
            queue_s=self.queue_s,
            prefill_s=max(0.0, self.first_output_s - self.made_s - self.queue_s),
            decode_s=now_s - self.first_output_s,
            num_preemptions=self.num_preemptions,
        )
