"""The bench's workloads W1 to W4 on a simulated engine, to compare the cost model with a real engine."""

from __future__ import annotations

from collections import deque

from rayloom_bench.fleet.engine import EngineListener, EngineShape, SimulatedEngine, VirtualClock
from rayloom_bench.workload import Purpose, Workload, token_prompts
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import Sequence

_VOCAB = 49_152


class ClosedLoop(EngineListener):
    """Clients, each of which sends its next request as soon as its last request is answered."""

    def __init__(self, shape: EngineShape) -> None:
        self._clock = VirtualClock()
        self._engine = SimulatedEngine("engine", shape, self._clock, self)
        self._waiting: deque[Sequence] = deque()
        self._num_left = 0

    def output_tok_s(self, workload: Workload) -> float:
        """Returns the output tokens per second of a workload, after a warm-up with other prompts."""
        self._run(workload.warm_up(), "warm-up")
        return workload.num_requests * workload.num_output / self._run(workload, "measured")

    def _run(self, workload: Workload, purpose: Purpose) -> float:
        """Sends all requests of the workload. Returns the seconds until the last request is answered."""
        prompts = token_prompts(workload, seed=0, vocab_size=_VOCAB, purpose=purpose)
        self._waiting.extend(
            Sequence(
                request_id=f"{purpose}-{number}",
                prompt_ids=prompt,
                params=DecodingParams(max_tokens=workload.num_output, temperature=0.0, ignore_eos=True),
            )
            for number, prompt in enumerate(prompts)
        )
        self._num_left = workload.num_requests
        begin_s = self._clock.now_s
        for _ in range(workload.concurrency):
            self._engine.submit(self._waiting.popleft())
        end_s = begin_s
        while self._num_left and self._clock.handle_next():
            end_s = self._clock.now_s
        return end_s - begin_s

    def outputs(self, engine: str, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._num_left -= 1
                if self._waiting:
                    self._engine.submit(self._waiting.popleft())
