"""A core's loop with messages of fronts and a rank without a model."""

from __future__ import annotations

import time
from pathlib import Path

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.sockets import InboxMessage
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.protocol.messages import (
    ServedModel,
    Submit,
)
from rt_scheduler import VOCAB, SimulatedRank, make_scheduler

MODEL = ServedModel(
    path="",
    architecture="",
    num_parameters=1,
    vocab_size=VOCAB,
    max_model_len=40,
    eos_token_ids=(),
    dtype="float32",
    compute_dtype="float32",
    weight_bytes=4,
)
SUBMIT = Submit(sequence_id="s", prompt_ids=tuple(range(20)), params=DecodingParams(max_tokens=2, temperature=0.0))


class CoreUnderTest:
    def __init__(self, folder: Path) -> None:
        self.build_steps: dict[str, int] = {}
        self.sent: list[tuple[int, object]] = []
        self.rank = SimulatedRank(build_steps=self.build_steps)
        self.engine = Engine(make_scheduler(), LocalExecutor(self.rank), clock=time.monotonic)
        self.box = BlackBox(folder)
        self.state = CoreState(epoch=1, executor="uni", hang_seconds=3.0)
        self.core = Core(self.engine, MODEL, None, self.state, self.box)  # type: ignore[arg-type]

    def take(self, connection: int, message: InboxMessage) -> None:
        self.core._handle(connection, message)

    def die_in_a_step(self) -> None:
        self.core._hold_trial()
        assert self.engine.scheduler.schedule() is not None
        self.core._note()
        self.box.died()
        self.engine.scheduler.forget_ranks()
        self.rank.forget_all()


class NoIo:
    """A CoreIo that sends nothing."""

    def send(self, connection: int, message: object) -> None:
        pass
