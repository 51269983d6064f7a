"""A load on a simulated engine in virtual time: clients send their next request after each answer."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

from rayloom_bench.figures import percentile
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core.step_work import StepWork
from rt_scheduler import make_scheduler, make_sequence

# operation counts of a model with 135M parameters
WORK = StepWork(flops_per_token=270e6, flops_per_pair=69_120.0, num_layers=30)
_HOST_S = 0.0005  # seconds of a step outside the model
_HTTP_S = 0.003  # seconds from sending a request to its arrival at an idle engine
_SPACING_S = 0.001  # seconds between arrivals of requests that are sent together


@dataclass(frozen=True, slots=True)
class Load:
    num_requests: int
    concurrency: int
    num_prompt: int
    num_output: int


W1 = Load(32, 16, 128, 64)
W4 = Load(8, 4, 2048, 32)


@dataclass(frozen=True, slots=True)
class Seen:
    """The figures that the clients measured."""

    tok_s: float  # output tokens
    ttft_s: tuple[float, ...]  # seconds to the first token, of all requests, ascending
    gaps_s: tuple[float, ...]  # seconds between tokens of a stream, ascending

    def ttft_ms(self, share: float) -> float:
        return 1e3 * percentile(self.ttft_s, share)

    def gap_ms(self, share: float) -> float:
        return 1e3 * percentile(self.gaps_s, share)


class LinearRank:
    """A rank with the times of SmolLM2-135M on 2 cores.

    A step takes 5.2 ms. A decode adds 0.36 ms, and a token of a prompt adds 0.245 ms.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        seconds = 0.0052
        for step in plan.slots:
            num = step.num_tokens
            pairs = num * (step.start + num)
            seconds += 0.00036 if num == 1 else 0.000245 * num + 0.13e-6 * pairs
        self.now_s += seconds
        sampled = tuple(SampledToken(step.slot, 5) for step in plan.slots if step.samples)
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled, forward_s=seconds)

    def forget_all(self) -> None:
        raise AssertionError("no step of this rank fails")


class LoadedEngine:
    """A warmed-up engine with a token budget of 512, for measurements under several loads."""

    def __init__(self, work: StepWork = WORK) -> None:
        """`work`: operation counts. Without them, the engine measures no costs, and only the budget limits steps."""
        self._rank = LinearRank()
        sizes = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4096}
        scheduler = make_scheduler(4000, enable_prefix_caching=False, **sizes)
        self._engine = Engine(scheduler, LocalExecutor(self._rank), clock=lambda: self._rank.now_s, work=work)

    def run(self, load: Load) -> Seen:
        rank = self._rank
        arrivals: list[tuple[float, int]] = []  # (time, number of the request), a heap
        sent_s: dict[str, float] = {}
        tokens_s: dict[str, list[float]] = {}
        started_s = rank.now_s

        def send(num: int) -> None:
            for place in range(num):
                number = len(sent_s)
                sent_s[f"{number}"] = rank.now_s
                tokens_s[f"{number}"] = []
                heapq.heappush(arrivals, (rank.now_s + _HTTP_S + _SPACING_S * place, number))

        send(load.concurrency)
        num_ended = 0
        while num_ended < load.num_requests:
            while arrivals and arrivals[0][0] <= rank.now_s:
                _, number = heapq.heappop(arrivals)
                self._engine.add(make_sequence(f"{number}", range(load.num_prompt), load.num_output))
            if not self._engine.has_unfinished:
                rank.now_s = arrivals[0][0]
                continue
            outputs = self._engine.step()
            rank.now_s += _HOST_S
            for output in outputs:
                tokens_s[output.sequence_id].append(rank.now_s)
            num_new = sum(1 for output in outputs if output.finish_reason)
            num_ended += num_new
            send(min(num_new, load.num_requests - len(sent_s)))
        gaps_s = [after - before for times in tokens_s.values() for before, after in pairwise(times)]
        return Seen(
            tok_s=load.num_requests * load.num_output / (rank.now_s - started_s),
            ttft_s=tuple(sorted(times[0] - sent_s[name] for name, times in tokens_s.items())),
            gaps_s=tuple(sorted(gaps_s)),
        )
