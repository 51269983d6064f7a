"""Engine: gets plans from a scheduler, runs them on an executor and returns outputs. It has no sockets or threads."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.load import SchedulerLoad
from rayloom_engine.core.measured_load import measured_load
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.probe import PROBE_PREFIX, is_probe
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.stats import STEP_TOKEN_BOUNDS, SchedulerStats
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.step_seconds import StepMeter
from rayloom_engine.core.step_work import StepForecast, StepWork


class Executor(Protocol):
    """Runs plans on all ranks, in order. `submit` and `collect` raise if a rank is lost."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Returns the result of the oldest uncollected plan. Waits until the last stage has sent the result."""

    def forget_all(self) -> None:
        """Drops all submitted plans and empties every slot of every rank."""


class PlanRunner(Protocol):
    """Computes plans in this process. `worker.runner.Runner` implements it."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def forget_all(self) -> None: ...


class LocalExecutor:
    """Executor for an engine whose only rank is this process. Computes a plan when its result is collected."""

    def __init__(self, rank: PlanRunner) -> None:
        self._rank = rank
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self._rank.run(self._plans.popleft())

    def forget_all(self) -> None:
        self._plans.clear()
        self._rank.forget_all()


@dataclass(slots=True)
class StepTimes:
    """Totals since the start. Times are in seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    token_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    forward: float = 0.0  # forward passes, also those of the draft model
    sample: float = 0.0
    host: float = 0.0  # all other work of a step (scheduling, input preparation, update), without waits for other steps

    def note_tokens(self, num_tokens: int) -> None:
        """Counts the tokens of one step."""
        self.num_tokens += num_tokens
        self.token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1


class Engine:
    """Queues sequences and computes their tokens in steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        work: StepWork | None = None,
    ) -> None:
        """`work`: operation counts of the model, to forecast how long steps take; None: all forecasts are 0 s."""
        self.scheduler = scheduler
        self.forecast = StepForecast(work or StepWork())
        self._meter = StepMeter(work or StepWork())
        self.times = StepTimes()
        self.before_run: Callable[[], None] = lambda: None  # called after a plan is scheduled, before it is submitted
        self.last_token_at: float | None = None  # time (by `clock`) at which a token last passed through all ranks
        self._executor = executor
        self._clock = clock
        self._num_probes = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, sequence: Sequence, is_resume: bool = False) -> SequenceOutput | None:
        """Queues a sequence. Raises RequestError or QueueFull.

        A front may resume a sequence that already has its last token. Such a sequence is not queued, and the result is
        an output with its finish reason. For all other sequences the result is None.
        """
        reason = sequence.finish_reason(self.scheduler.config.max_model_len) if sequence.num_generated else None
        if reason is not None:
            return SequenceOutput(sequence_id=sequence.request_id, finish_reason=reason)
        sequence.queued_at = self._clock()
        self.scheduler.add(sequence, is_resume)
        return None

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def add_probe(self) -> None:
        """Queues a probe: a sequence of one token, to prove that every rank still computes."""
        self._num_probes += 1
        self.scheduler.add(
            Sequence(
                request_id=f"{PROBE_PREFIX}{self._num_probes}",
                prompt_ids=(0,),
                params=DecodingParams(max_tokens=1, temperature=0.0),
            ),
            is_resume=True,
        )

    def step(self) -> list[SequenceOutput]:
        """Submits plans until the scheduler returns none. Then waits for the oldest plan and returns its outputs.

        Returns an empty list if no plan is in flight.
        """
        times = self.times
        started = self._clock()
        try:
            while (plan := self.scheduler.schedule(self._meter.costs())) is not None:
                self.forecast.submitted(plan)
                self._meter.submitted(plan)
                self.before_run()
                self._executor.submit(plan)
                times.note_tokens(plan.num_tokens)
                if plan.new_slots:
                    self.scheduler.note_starts(plan, self._clock())
            if self.scheduler.num_in_flight == 0:
                return []
            asked = self._clock()
            result = self._executor.collect()
            waited = self._clock() - asked
        except BaseException:
            # After any exception, even KeyboardInterrupt, slots and blocks may be in any state. So only the sequences
            # are kept.
            self._executor.forget_all()
            self.scheduler.forget_ranks()
            self.forecast.forget()
            self._meter.forget()
            raise
        self.forecast.ended(result.forward_s)
        self._meter.ended(result.forward_s + result.sample_s - result.waited_s, result.draft_work)
        outputs = self.scheduler.update(result)
        now = self._clock()
        # A chunk of a prompt counts, too: no token is sampled, but the tokens of the chunk have passed through all
        # ranks.
        self.last_token_at = now
        times.num_steps += 1
        forward_s = result.forward_s + (0.0 if result.draft_work is None else result.draft_work.seconds)
        times.forward += forward_s
        times.sample += result.sample_s
        # Host time is the time of this call without the ranks' work. If at most one plan is in flight, the ranks
        # compute only during this call. So the times of forward pass and sampling are subtracted. If several plans may
        # be in flight, the ranks also compute between calls. So only the wait for the result is subtracted.
        is_alone = self.scheduler.config.depth == 1
        times.host += now - started - (forward_s + result.sample_s if is_alone else waited)
        return [output for output in outputs if not is_probe(output.sequence_id)]

    def load(self) -> SchedulerLoad:
        """Returns the work that is left, with the measured cost of a decode."""
        return self.scheduler.load(self._meter.costs())

    def stats(self) -> SchedulerStats:
        scheduler = self.scheduler
        counters = self.scheduler.counters
        times = self.times
        tier = scheduler.pool.tier
        now = measured_load(scheduler, self._meter.costs())
        return SchedulerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.pool.num_blocks,
            num_free_blocks=scheduler.pool.num_free,
            num_preemptions=counters.num_preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            host_hits=counters.host_hits,
            num_host_slots=0 if tier is None or not tier.is_usable else tier.slots.num_slots,
            num_used_host_slots=0 if tier is None else tier.slots.num_used,
            num_host_stores=0 if tier is None else tier.num_stored,
            num_host_loads=0 if tier is None else tier.num_loaded,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_corrupt=counters.num_corrupt,
            num_drafts=counters.num_drafts,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            num_steps=times.num_steps,
            step_tokens=times.num_tokens,
            step_token_counts=tuple(times.token_counts),
            forward_seconds=times.forward,
            sample_seconds=times.sample,
            host_seconds=times.host,
            queued_tokens=now.queued_tokens,
            running_tokens=now.running_tokens,
            max_running_tokens=now.max_running_tokens,
            mean_output_tokens=counters.mean_output_tokens,
            prefill_tokens_per_s=now.prefill_tokens_per_s,
            decode_tokens_per_s=now.decode_tokens_per_s,
        )
