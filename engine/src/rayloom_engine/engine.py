"""The engine: a scheduler and an executor, one step at a time. No sockets, no threads: the shells have those."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.sequence import Sequence, SequenceOutput
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.protocol.messages import SchedulerStats

_PROBE_PREFIX = "probe/"  # no other id begins so: the core prefixes its own with a connection number


class Executor(Protocol):
    """Runs plans on all ranks. `run` returns the result of the last stage, or raises when a rank is lost."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def forget_all(self) -> None:
        """Empties every slot of every rank."""


def is_probe(request_id: str) -> bool:
    return request_id.startswith(_PROBE_PREFIX)


@dataclass(slots=True)
class StepTimes:
    """Totals since start, in seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    forward: float = 0.0
    sample: float = 0.0
    host: float = 0.0  # everything else in a step: scheduling, preparing, booking


class Engine:
    """Accepts sequences and advances all of them, step by step."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.times = StepTimes()
        self.before_run: Callable[[list[Sequence]], None] = lambda in_flight: None  # told what a step will compute
        self.last_token_at: float | None = None  # by `clock`; when a token last passed through all ranks
        self._executor = executor
        self._clock = clock
        self._num_probes = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, sequence: Sequence, is_resume: bool = False) -> SequenceOutput | None:
        """Queues a sequence. An output at once means that it was complete when it came (a resume of the last token).

        Raises RequestError or QueueFull.
        """
        reason = sequence.finish_reason(self.scheduler.config.max_model_len) if sequence.num_generated else None
        if reason is not None:
            return SequenceOutput(request_id=sequence.request_id, finish_reason=reason)
        self.scheduler.add(sequence, is_resume)
        return None

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def add_probe(self) -> None:
        """Queues one token of our own, to prove that every rank still computes."""
        self._num_probes += 1
        self.scheduler.add(
            Sequence(
                request_id=f"{_PROBE_PREFIX}{self._num_probes}",
                prompt_ids=(0,),
                params=DecodingParams(max_tokens=1, temperature=0.0),
            ),
            is_resume=True,
        )

    def step(self) -> list[SequenceOutput]:
        """Runs one step and returns what it brought; empty when there was nothing to do."""
        started = self._clock()
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        try:
            self.before_run(self.scheduler.in_flight())
            result = self._executor.run(plan)
        except BaseException:
            # Also an interrupt: slots and blocks may be in any state, so they start afresh. The sequences are kept.
            self._executor.forget_all()
            self.scheduler.forget_ranks()
            raise
        outputs = self.scheduler.update(plan, result)
        now = self._clock()
        if result.sampled:
            self.last_token_at = now
        times = self.times
        times.num_steps += 1
        times.num_tokens += plan.num_tokens
        times.forward += result.forward_s
        times.sample += result.sample_s
        times.host += now - started - result.forward_s - result.sample_s
        return [output for output in outputs if not is_probe(output.request_id)]

    def stats(self) -> SchedulerStats:
        scheduler, counters, times = self.scheduler, self.scheduler.counters, self.times
        return SchedulerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.pool.num_blocks,
            num_free_blocks=scheduler.pool.num_free,
            num_preemptions=counters.num_preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=times.num_steps,
            step_tokens=times.num_tokens,
            forward_seconds=times.forward,
            sample_seconds=times.sample,
            host_seconds=times.host,
        )
