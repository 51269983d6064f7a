"""AttachedRank: a rank process with both of its connections to the EngineCore."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from rayloom_engine.core.adapter import NeededAdapter
from rayloom_engine.protocol.channel import Channel
from rayloom_engine.protocol.messages import RankReport
from rayloom_engine.protocol.ranks import Beat, Greeting, Loaded, NeededAdapters, Welcomed

NO_BEAT = Beat(phase="start", step=0, memory_bytes=0)


@dataclass(slots=True, eq=False)
class Control:
    """A rank's "control" connection. Two threads send: the main thread, and the thread that reads the beats."""

    channel: Channel
    beat: Beat = NO_BEAT
    beat_at: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    _adapters: tuple[NeededAdapter, ...] = ()  # the list that the rank has
    _is_free: threading.Lock = field(default_factory=threading.Lock)  # held while a message is sent

    def welcome(self, adapters: tuple[NeededAdapter, ...]) -> None:
        """Accepts the connection, and gives the rank the list of needed adapters."""
        self._adapters = adapters
        self.channel.send(Welcomed(adapters=adapters))

    def need(self, adapters: tuple[NeededAdapter, ...]) -> None:
        """Sends the rank a changed list of needed adapters."""
        if adapters != self._adapters:
            self._adapters = adapters
            with self._is_free:
                self.channel.send(NeededAdapters(adapters))

    def send_encoded(self, data: bytes) -> None:
        with self._is_free:
            self.channel.send_encoded(data)


@dataclass(slots=True, eq=False)
class AttachedRank:
    """A rank process with both of its connections. `loaded` is None until its weights are loaded."""

    greeting: Greeting
    steps: Channel
    control: Control
    loaded: Loaded | None = None

    @property
    def rank(self) -> int:
        return self.greeting.rank

    def close(self) -> None:
        self.steps.close()
        self.control.channel.close()

    def status(self, now: float) -> RankReport:
        beat = self.control.beat
        return RankReport(
            rank=self.rank,
            node=self.greeting.node,
            host=self.greeting.host,
            pid=self.greeting.pid,
            phase=beat.phase,
            heartbeat_age_s=now - self.control.beat_at,
            step=beat.step,
            memory_bytes=beat.memory_bytes,
            advance=beat.advance,
            communication_s=beat.communication_s,
            weight_bytes_read=self.loaded.bytes_read if self.loaded else 0,
        )
