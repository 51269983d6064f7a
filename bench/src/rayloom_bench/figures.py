"""Computes the figures of a workload from the times of its requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request with a complete answer. Times are in seconds, on one clock for the whole workload."""

    index: int
    num_prompt: int
    num_output: int
    start_s: float
    arrivals_s: tuple[float, ...]  # times at which new tokens arrived; several tokens may arrive together
    last_s: float  # time at which the last token had arrived
    end_s: float

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.arrivals_s[0] - self.start_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The reported figures of one workload."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    output_tok_s: float
    total_tok_s: float  # prompt and output tokens per second
    ms_per_token: float | None  # mean inter-token latency; None when every output is one token
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None  # median of the gaps between arrivals; None if every answer arrived at once
    itl_p99_ms: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile at `share` (0 to 1), interpolated linearly. `values` must not be empty."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(records: Sequence[RequestRecord]) -> Figures:
    """The figures of a workload. `records` must not be empty.

    The mean inter-token latency is the time from the first to the last token, divided by the number of tokens after the
    first. So the mean is exact even if tokens arrive together or have no text. The percentiles are over the gaps
    between arrivals, as a client of the stream sees them.
    """
    wall_s = max(record.end_s for record in records) - min(record.start_s for record in records)
    prompt_tokens = sum(record.num_prompt for record in records)
    output_tokens = sum(record.num_output for record in records)
    first_tokens_s = [record.first_token_s for record in records]
    gaps_s = [gap for record in records for gap in record.gaps_s]
    num_later_tokens = sum(record.num_output - 1 for record in records)
    later_s = sum(record.last_s - record.arrivals_s[0] for record in records)
    return Figures(
        num_requests=len(records),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wall_s=wall_s,
        output_tok_s=output_tokens / wall_s,
        total_tok_s=(prompt_tokens + output_tokens) / wall_s,
        ms_per_token=1e3 * later_s / num_later_tokens if num_later_tokens else None,
        ttft_p50_ms=1e3 * percentile(first_tokens_s, 0.5),
        ttft_p99_ms=1e3 * percentile(first_tokens_s, 0.99),
        itl_p50_ms=1e3 * percentile(gaps_s, 0.5) if gaps_s else None,
        itl_p99_ms=1e3 * percentile(gaps_s, 0.99) if gaps_s else None,
    )
