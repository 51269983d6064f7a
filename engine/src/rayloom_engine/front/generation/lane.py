"""Lane: one choice of a generation, from its sequence to its text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.messages import SequenceOutput
from rayloom_engine.text.output_decoder import OutputDecoder, TextDelta


@dataclass(slots=True, kw_only=True)
class Lane:
    sequence: ClientSequence
    decoder: OutputDecoder
    made_s: float = field(default_factory=time.monotonic)  # time just before the sequence is submitted
    queue_s: float = 0.0  # seconds that the core let the sequence wait
    num_preemptions: int = 0
    first_output_s: float | None = None
    last_output_s: float | None = None
    has_begun: bool = False  # an output has arrived
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # set only for a prompt's first choice

    def decode(self, outputs: Sequence[SequenceOutput]) -> TextDelta:
        """Returns the text of one or more new outputs."""
        self.has_begun = True
        last = outputs[-1]
        self.num_preemptions = max(self.num_preemptions, last.num_preemptions)
        if len(outputs) == 1:  # as almost always
            return self.decoder.add(last.token_ids, last.logprobs, last.finish_reason, last.stop_token_id)
        return self.decoder.add(
            [token_id for output in outputs for token_id in output.token_ids],
            [entry for output in outputs for entry in output.logprobs],
            last.finish_reason,
            last.stop_token_id,
        )
