"""FleetOutcome: the figures of a simulated run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_bench.figures import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGoal:
    """The largest latencies of a request that counts for the goodput."""

    ttft_s: float = 1.0  # time to first token
    itl_s: float = 0.1  # mean inter-token latency


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    ttft_s: float
    itl_s: float  # mean inter-token latency; 0 for a single token
    num_output: int
    num_resumes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    policy: str
    finished: tuple[FinishedRequest, ...]
    num_lost: int  # requests that were refused because of a full queue, or lost with their engine
    span_s: float  # seconds from the first arrival to the last token
    engine_hours: float
    num_failures: int
    prefix_queries: int  # tokens of admitted prompts
    prefix_hits: int  # the part of prefix_queries that was cached
    num_events: int

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    @property
    def output_tok_s(self) -> float:
        return sum(request.num_output for request in self.finished) / self.span_s if self.span_s else 0.0

    @property
    def num_resumed(self) -> int:
        return sum(request.num_resumes > 0 for request in self.finished)

    def goodput(self, goal: LatencyGoal) -> float:
        """Returns the requests per second whose latencies met the goal."""
        num = sum(request.ttft_s <= goal.ttft_s and request.itl_s <= goal.itl_s for request in self.finished)
        return num / self.span_s if self.span_s else 0.0

    def ttft_s(self, share: float) -> float:
        """Returns a percentile of the time to first token; infinite if no request has finished."""
        times = [request.ttft_s for request in self.finished]
        return percentile(times, share) if times else float("inf")
