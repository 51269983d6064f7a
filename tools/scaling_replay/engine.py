"""One engine in virtual time. A step costs a constant, plus a time for each token and each context token.

The scheduling resembles the real engine's: slots, a token budget, decodes first, then prompts in order. A sequence
begins only when the KV cache has room for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from rayloom_operator.decide.scaling.load import EngineLoad
from scaling_replay.traces import Request

SLOTS = 64
BUDGET = 2048  # the most tokens in a step
KV_TOKENS = 200_000
# An 8B model on a GPU of 300 GB/s and 60 TFLOPS.
STEP_S = 0.025
TOKEN_S = 0.000_12
CONTEXT_S = 0.000_000_12
_NUM_OUTPUTS = 32


def step_s(tokens: int, context: int) -> float:
    return STEP_S + TOKEN_S * tokens + CONTEXT_S * context


@dataclass(slots=True)
class SimulatedEngine:
    ready_at: float
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[list[int]] = field(default_factory=deque)  # [index of the request, prompt tokens that are left]
    ends: list[tuple[int, int, int]] = field(default_factory=list)  # heap of (tick, prompt, output)
    held: int = 0  # tokens of running sequences in the KV cache
    reserved: int = 0  # KV tokens that running sequences will have at their end
    tick: int = 0  # number of decode steps so far
    at: float = 0.0  # end of the last step
    is_leaving: bool = False
    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_OUTPUTS))
    queued: int = 0  # prompt tokens that are not computed yet
    admitted: list[Request] = field(default_factory=list)
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # (arrival, seconds to the first token)

    @property
    def num_running(self) -> int:
        return len(self.ends) + len(self.prefilling)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.num_running)

    def add(self, request: Request, now: float) -> None:
        if not self.is_busy:
            self.at = max(self.at, now)
        self.waiting.append(request)
        self.queued += request.prompt

    def run(self, until: float) -> None:
        """Computes steps that begin before `until`."""
        while self.is_busy and self.at < until:
            self._step()

    def _step(self) -> None:
        while self.waiting and self.num_running < SLOTS:
            request = self.waiting[0]
            need = request.prompt + request.output
            if self.reserved + need > KV_TOKENS and self.num_running:
                break
            self.waiting.popleft()
            self.reserved += need
            self.prefilling.append([len(self.admitted), request.prompt])
            self.admitted.append(request)
        num_decodes = len(self.ends)
        left = BUDGET - num_decodes
        done: list[int] = []
        num_prompt_tokens = 0
        for entry in self.prefilling:
            chunk = min(entry[1], left - num_prompt_tokens)
            entry[1] -= chunk
            num_prompt_tokens += chunk
            if entry[1] == 0:
                done.append(entry[0])
            if num_prompt_tokens == left:
                break
        self.queued -= num_prompt_tokens
        self.at += step_s(num_decodes + num_prompt_tokens, self.held)
        self.held += num_decodes + num_prompt_tokens
        self.tick += 1
        self._end()
        for index in done:
            self.prefilling.popleft()
            self._begin(self.admitted[index])

    def _begin(self, request: Request) -> None:
        """Records the first token of a sequence."""
        self.first_tokens.append((request.at, self.at - request.at))
        if request.output > 1:
            heapq.heappush(self.ends, (self.tick + request.output - 1, request.prompt, request.output))
            self.held += 1
        else:
            self.held += 1
            self._leave(request.prompt, 1)

    def _end(self) -> None:
        while self.ends and self.ends[0][0] <= self.tick:
            _, prompt, output = heapq.heappop(self.ends)
            self._leave(prompt, output)

    def _leave(self, prompt: int, output: int) -> None:
        self.held -= prompt + output
        self.reserved -= prompt + output
        self.outputs.append(output)

    def load(self, now: float) -> EngineLoad:
        """Returns the load that the engine reports, as in `/status`."""
        most = KV_TOKENS
        if self.num_running:
            most = min(most, max(self.held, self.held * SLOTS // self.num_running))
        return EngineLoad(
            is_known=now >= self.ready_at,
            queued_tokens=self.queued,
            num_waiting=len(self.waiting),
            running_tokens=self.held,
            max_running_tokens=most,
            mean_output_tokens=sum(self.outputs) / len(self.outputs) if self.outputs else 0.0,
            prefill_per_s=BUDGET / step_s(BUDGET, 0),
            decode_per_s=SLOTS / step_s(SLOTS, self.held),
        )
