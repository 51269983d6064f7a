"""Prints the host time of a decode step without a model: microseconds of the main thread's CPU time, by part.

    .venv/bin/python tools/host_cost.py [batch sizes]

The parts run as in the EngineCore's main loop with the real scheduler, black box, slots, batch builder and sockets. A
front in a child process reads the outputs. `all threads` is the CPU time of the whole process, the I/O thread included.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.sockets import CoreIo, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.protocol.framing import frame, read_frame
from rayloom_engine.protocol.messages import Hello, ServedModel
from rayloom_engine.worker.batch import build_batch
from rayloom_engine.worker.slots import SlotTable

BATCH_SIZES = (1, 16, 64, 256)
NUM_PROMPT = 512
NUM_WARM_STEPS = 5
NUM_STEPS = 96  # a multiple of the block size, so that every sequence fills the same number of blocks
NUM_ROUNDS = 3  # the fastest round is printed
TOKEN = "token"
PARTS = ("schedule", "black box", "slots", "batch", "update", "send", "publish")


class Clock:
    """The main thread's CPU time by part. The time of a part within another part counts only for the inner part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started = time.thread_time()
            try:
                return function(*args, **keywords)
            finally:
                spent = time.thread_time() - started
                self.seconds[part] += spent - self._inner
                self._inner = outer + spent

        return call


class EmptyRank:
    """A rank without a model: builds each step's batch and samples token 5 for every row."""

    def __init__(self, clock: Clock) -> None:
        self._slots = SlotTable(0)
        self._apply = clock.timed("slots", self._slots.apply)
        self._build = clock.timed("batch", build_batch)

    def run(self, plan: StepPlan) -> StepResult:
        self._build(self._apply(plan), self._slots.block_tables, BLOCK_SIZE)
        sampled = tuple(SampledToken(step.slot, 5) for step in plan.slots if step.samples)
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled)

    def forget_all(self) -> None:
        raise AssertionError("no rank is lost here")


def make_core(batch: int, io: CoreIo, inbox: Inbox, clock: Clock, folder: Path) -> tuple[Core, Engine]:
    num_blocks = batch * (NUM_PROMPT + NUM_WARM_STEPS + (NUM_ROUNDS + 1) * NUM_STEPS) // BLOCK_SIZE + batch
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * NUM_PROMPT,
            max_model_len=num_blocks * BLOCK_SIZE // batch,
            max_queued=0,
        )
    )
    engine = Engine(scheduler, LocalExecutor(EmptyRank(clock)), clock=time.monotonic)
    state = CoreState(epoch=0, executor="uni")
    core = Core(engine, _model(), io, state, BlackBox(folder))
    engine.before_run = clock.timed("black box", core._note)
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = clock.timed("update", scheduler.update)  # type: ignore[method-assign]
    for index in range(batch):
        engine.add(
            Sequence(
                request_id=f"1.1/cmpl-{index:032d}-0",
                prompt_ids=tuple((index * 31 + place) % 997 for place in range(NUM_PROMPT)),
                params=DecodingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True),
            )
        )
    return core, engine


def measure(batch: int, folder: Path) -> str:
    """Returns a row of the table."""
    address = f"unix:{folder}/core.sock"
    inbox = Inbox(deque(), threading.Event())
    io = CoreIo(address, TOKEN, inbox, CoreState(epoch=0, executor="uni").status)
    io.start()
    front = subprocess.Popen([sys.executable, __file__, "--front", address], stdout=subprocess.PIPE)
    assert front.stdout is not None
    front.stdout.readline()
    clock = Clock()
    core, engine = make_core(batch, io, inbox, clock, folder)
    end_note = clock.timed("black box", core._end_step)
    send = clock.timed("send", core._send)
    publish = clock.timed("publish", core._publish)
    best: dict[str, float] = {}
    for round_number in range(NUM_ROUNDS + 1):
        clock.seconds = dict.fromkeys(PARTS, 0.0)
        started = time.thread_time()
        started_all = time.process_time()
        started_wall = time.perf_counter()
        num_steps = NUM_STEPS if round_number else NUM_WARM_STEPS
        for _ in range(num_steps):
            outputs = engine.step()
            end_note()
            send(outputs)
            publish()
        figures = dict(clock.seconds)
        figures["main thread"] = time.thread_time() - started
        figures["all threads"] = time.process_time() - started_all
        figures["wall"] = time.perf_counter() - started_wall
        figures = {name: 1e6 * seconds / num_steps for name, seconds in figures.items()}
        if round_number and (not best or figures["main thread"] < best["main thread"]):
            best = figures
    io.stop()
    front.kill()
    front.wait()
    return f"{batch:5d} " + " ".join(f"{best[name]:11.0f}" for name in best)


def _model() -> ServedModel:
    return ServedModel(
        path="",
        architecture="",
        num_parameters=1,
        vocab_size=1000,
        max_model_len=10**6,
        eos_token_ids=(),
        dtype="float32",
        compute_dtype="float32",
        weight_bytes=4,
    )


async def read_all(address: str) -> None:
    """A front that reads and drops all messages."""
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    writer.write(frame(Hello(token=TOKEN, front_id="f")))
    await read_frame(reader)
    await read_frame(reader)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    while await reader.read(2**20):
        pass


def main() -> None:
    if sys.argv[1:2] == ["--front"]:
        asyncio.run(read_all(sys.argv[2]))
        return
    names = (*PARTS, "main thread", "all threads", "wall")
    print("us    " + " ".join(f"{name:>11}" for name in names))
    for batch in [int(word) for word in sys.argv[1:]] or BATCH_SIZES:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(batch, Path(folder)))


if __name__ == "__main__":
    main()
