"""SinkFeed: turns a generation's outputs into parts of the answer's body, in the callback that reads the mailbox.

`SinkFeed.read` is called for each token of each stream. Other processes evict the data of the streams from the CPU
caches between two steps. So the CPU time of a token grows with the number of objects that `read` accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rayloom_engine.front.core_link.request_mailbox import Items, Mailbox, Outbox
from rayloom_engine.front.generation.deltas import ChoiceDelta
from rayloom_engine.front.generation.lane import Lane
from rayloom_engine.front.generation.sink import DeltaSink
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.protocol.messages import SequenceOutput
from rayloom_engine.text.output_decoder import TextDelta

OUTPUTS_AT_ONCE = 64  # the most outputs of a request that a callback decodes, in 1 ms


class Decoder(Protocol):
    """The generation that a SinkFeed works for."""

    @property
    def is_rounded(self) -> bool:
        """True if the generation has a warning that its results may differ by rounding."""

    @property
    def is_finished(self) -> bool:
        """True if every choice is finished."""

    def decode(self, items: Items, now_s: float) -> list[ChoiceDelta]:
        """Returns one delta per choice."""


class SinkFeed:
    """The reader of a generation's mailbox while a sink takes small deltas."""

    __slots__ = ("_decoder", "_lanes", "_mailbox", "_metrics", "_sink", "_started_s")

    def __init__(
        self,
        sink: DeltaSink,
        decoder: Decoder,
        lanes: Sequence[Lane],
        mailbox: Mailbox,
        metrics: Metrics,
        started_s: float,
    ) -> None:
        """`started_s`: time.monotonic at which the request began."""
        self._sink = sink
        self._decoder = decoder
        self._lanes = lanes
        self._mailbox = mailbox
        self._metrics = metrics
        self._started_s = started_s

    def read(self, items: Items, outbox: Outbox, now_s: float) -> bool:
        """Decodes outputs and adds their parts of the body to `outbox`. A Reader.

        Returns False, without any effect, if the stream's task must send the deltas. It must send deltas that may be
        long, because it encodes them in parts: for example the first delta of each choice.
        """
        if len(items) == 1:  # the usual case
            index, output = items[0]
            lane = self._lanes[index]
            if not self._sink.is_open():
                return False
            if self._read_text(index, lane, output, outbox, now_s):
                return True
            if not lane.has_begun:
                return False
        elif not self._may_decode(items):
            return False
        for delta in self._decoder.decode(items, now_s):
            self._put(delta, outbox)
        if self._decoder.is_finished:
            self._mailbox.wake()
        return True

    def _may_decode(self, items: Items) -> bool:
        if len(items) > OUTPUTS_AT_ONCE or not self._sink.is_open():
            return False
        return all(self._lanes[index].has_begun for index, _ in items)

    def _read_text(self, index: int, lane: Lane, output: SequenceOutput, outbox: Outbox, now_s: float) -> bool:
        """Decodes an output inside a choice. Returns False, without any effect, if only `decode` can decode it."""
        events = lane.events
        if events is None or output.finish_reason is not None:
            return False
        if lane.sequence.place.is_rounded and not self._decoder.is_rounded:
            return False  # the event needs a new warning
        token_ids = output.token_ids
        text = lane.decoder.simple_text(token_ids)
        if text is None:
            return False
        lane.observe(self._metrics, len(token_ids), now_s, self._started_s)
        event = events.event(text, token_ids)
        if event is None:
            self._put(ChoiceDelta(index=index, text=TextDelta(text=text, token_ids=token_ids), is_first=False), outbox)
        else:
            sink = self._sink
            outbox.append((self._mailbox, sink.write, sink.framed(event)))
        return True

    def _put(self, delta: ChoiceDelta, outbox: Outbox) -> None:
        part = self._sink.part(delta)
        if part:
            outbox.append((self._mailbox, self._sink.write, part))
        self._lanes[delta.index].events = self._sink.text_events(delta.index)
