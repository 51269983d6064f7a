"""SimulatedEngine: the real scheduler, engine and reports, with a rank that only computes the duration of each step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rayloom_bench.fleet.step_cost import StepCost
from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core_server.cache_publisher import CachePublisher
from rayloom_engine.errors import QueueFull
from rayloom_engine.protocol.messages import CoreMessage

TOKEN = 5  # id of every sampled token
_IDLE_REPORT_S = 0.25  # seconds from the last step until the idle engine sends a report, as in the core's loop
_GATEWAY = 1  # number of the only connection


class VirtualClock:
    """A queue of events by their time. `now_s`: the time of the event that is being handled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, event)

    def handle_next(self) -> bool:
        """Handles the earliest event. Returns False if there is none."""
        if not self._events:
            return False
        self.now_s, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Limits of an engine, as in its settings. The defaults describe an engine on a CPU."""

    cost: StepCost
    num_kv_blocks: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    max_queued: int = 1024
    # Seconds of a step outside of the model. On a CPU, core and front use the same cores as the model. A streamed token
    # takes 22 us (docs/design/engine-front.md), and a decode takes 3 us in the scheduler (docs/design/engine-core.md).
    host_s: float = 0.0005
    host_token_s: float = 25e-6  # seconds for each sequence with a new token

    def scheduler(self) -> Scheduler:
        return Scheduler(
            SchedulerConfig(
                num_blocks=self.num_kv_blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                max_queued=self.max_queued,
            )
        )


class CostedRank:
    """A rank that computes nothing. `last_s` is the duration of the last plan in seconds."""

    def __init__(self, cost: StepCost, scheduler: Scheduler) -> None:
        self.last_s = 0.0
        self._cost = cost
        self._scheduler = scheduler

    def run(self, plan: StepPlan) -> StepResult:
        pool = self._scheduler.pool
        self.last_s = self._cost.seconds(plan.slots, BLOCK_SIZE * (pool.num_blocks - pool.num_free))
        sampled = tuple([SampledToken(step.slot, TOKEN) for step in plan.slots if step.samples])
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled, forward_s=self.last_s)

    def forget_all(self) -> None:
        raise AssertionError("an engine of the simulation fails as a whole")


class EngineListener:
    """Receives all messages of an engine. The base class ignores them."""

    def outputs(self, engine: str, outputs: list[SequenceOutput]) -> None: ...

    def refused(self, engine: str, sequence_id: str) -> None: ...

    def report(self, engine: str, message: CoreMessage) -> bool:
        """Receives a message about prefix index or load. Returns False if the engine must send its whole index."""
        return True


class SimulatedEngine:
    """Runs steps back to back while it has work. Requests that arrive in a step wait for its end, as in the core."""

    def __init__(self, name: str, shape: EngineShape, clock: VirtualClock, listener: EngineListener) -> None:
        self.name = name
        self.is_lost = False
        self._shape = shape
        self._clock = clock
        self._listener = listener
        scheduler = shape.scheduler()
        self._rank = CostedRank(shape.cost, scheduler)
        self.engine = Engine(scheduler, LocalExecutor(self._rank), clock=lambda: clock.now_s, work=shape.cost.work())
        self._publisher = CachePublisher(self.engine, self, start=0)  # type: ignore[arg-type]
        self._inbox: list[Sequence] = []
        self._is_busy = False

    def subscribe(self) -> None:
        """Sends reports to the listener from now on."""
        self._publisher.subscribe(_GATEWAY)

    def send(self, connection: int, message: CoreMessage) -> None:
        """Passes a report to the listener. A real core would send it through its sockets."""
        if not self._listener.report(self.name, message):
            self._clock.after(0.0, self.subscribe)

    def submit(self, sequence: Sequence) -> None:
        self._inbox.append(sequence)
        if not self._is_busy:
            self._begin_step()

    def lose(self) -> None:
        """Ends the engine. From now on it sends nothing."""
        self.is_lost = True
        self._publisher.unsubscribe(_GATEWAY)

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and not self._inbox

    def _begin_step(self) -> None:
        for sequence in self._inbox:
            try:
                self.engine.add(sequence, is_resume=sequence.num_generated > 0)
            except QueueFull:
                self._listener.refused(self.name, sequence.request_id)
        self._inbox.clear()
        self._is_busy = self.engine.has_unfinished
        if not self._is_busy:
            self._clock.after(_IDLE_REPORT_S, self._report)
            return
        outputs = self.engine.step()
        host_s = self._shape.host_s + self._shape.host_token_s * len(outputs)
        self._clock.after(self._rank.last_s + host_s, lambda: self._end_step(outputs))

    def _end_step(self, outputs: list[SequenceOutput]) -> None:
        if self.is_lost:
            return
        if outputs:
            self._listener.outputs(self.name, outputs)
        self._report()
        self._begin_step()

    def _report(self) -> None:
        if not self.is_lost:
            self._publisher.publish(self._clock.now_s)
