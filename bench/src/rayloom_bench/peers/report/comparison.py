"""Medians and ratios over the rounds of a run. Pure.

Each ratio is computed from two figures of the same round, which are measured about a minute apart. Then the ratios of
all rounds are summarised.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayloom_bench.figures import percentile
from rayloom_bench.limit import output_tok_s
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.spread import Spread, quotients, spread
from rayloom_bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles over the requests of all rounds, in ms."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None  # None, like itl_p99_ms, if every answer arrived at once
    itl_p99_ms: float | None


def tok_s_by_round(result: PeersResult, engine: str, workload: str) -> dict[int, float]:
    """Output tokens per second of an engine in each round that has figures."""
    return {
        turn.round_number: turn.figures[workload].output_tok_s
        for turn in result.turns_of(engine)
        if workload in turn.figures
    }


def ratio(result: PeersResult, engine: str, others: Sequence[str], workload: str) -> Spread | None:
    """By round: the engine's tokens per second divided by those of the fastest of `others`."""
    numerators = tok_s_by_round(result, engine, workload)
    of_others = [tok_s_by_round(result, other, workload) for other in others]
    return spread(quotients(numerators, _largest_by_key(of_others)))


def workload_ratio(result: PeersResult, engine: str, workload: str, other_workload: str) -> Spread | None:
    """The engine's tokens per second in one workload divided by those in another workload of the same round."""
    return spread(quotients(tok_s_by_round(result, engine, workload), tok_s_by_round(result, engine, other_workload)))


def share_of_limit(result: PeersResult, engine: str, workload: Workload) -> Spread | None:
    """The engine's tokens per second divided by the machine's limit."""
    limit = limit_tok_s(result, workload)
    if limit is None:
        return None
    return spread(value / limit for value in tok_s_by_round(result, engine, workload.name).values())


def limit_tok_s(result: PeersResult, workload: Workload) -> float | None:
    """The machine's upper bound of output tokens per second, or None if it was not measured."""
    if result.cost is None or result.rates is None:
        return None
    return output_tok_s(workload, result.cost, result.rates)


def latency(result: PeersResult, engine: str, workload: str) -> Latency | None:
    """Percentiles over the requests of all rounds, or None if the engine has no figures."""
    records = [record for turn in result.turns_of(engine) for record in turn.records.get(workload, ())]
    if not records:
        return None
    first_tokens_s = [record.first_token_s for record in records]
    gaps_s = [gap for record in records for gap in record.gaps_s]
    return Latency(
        ttft_p50_ms=1e3 * percentile(first_tokens_s, 0.5),
        ttft_p99_ms=1e3 * percentile(first_tokens_s, 0.99),
        itl_p50_ms=1e3 * percentile(gaps_s, 0.5) if gaps_s else None,
        itl_p99_ms=1e3 * percentile(gaps_s, 0.99) if gaps_s else None,
    )


def start_s(result: PeersResult, engine: str) -> Spread | None:
    """Seconds from start to first token."""
    return spread(turn.start_to_first_token_s for turn in result.turns_of(engine))


def pss_bytes(result: PeersResult, engine: str) -> Spread | None:
    """Memory of all processes of the engine after the last workload of a round."""
    return spread(sum(turn.pss_bytes.values()) for turn in result.turns_of(engine) if turn.pss_bytes)


def memory_bytes(result: PeersResult, engine: str, workload: str) -> dict[str, float]:
    """Process name -> memory after the workload, the median over the rounds. Processes of one name are summed."""
    by_process: dict[str, list[int]] = {}
    for turn in result.turns_of(engine):
        of_turn: dict[str, int] = {}
        for process, size in turn.pss_after.get(workload, {}).items():
            name = process.rpartition(" ")[0]  # the process's name without its pid
            of_turn[name] = of_turn.get(name, 0) + size
        for name, size in of_turn.items():
            by_process.setdefault(name, []).append(size)
    return {name: statistics.median(sizes) for name, sizes in by_process.items()}


def neighbour_share(result: PeersResult, engine: str) -> Spread | None:
    """Spread over the rounds: tok/s of one stream beside a busy process, divided by tok/s of the stream alone."""
    found = [turn.neighbour for turn in result.turns_of(engine) if turn.neighbour is not None]
    return spread(each.beside_tok_s / each.alone_tok_s for each in found if each.alone_tok_s)


def _largest_by_key(maps: Iterable[Mapping[int, float]]) -> dict[int, float]:
    largest: dict[int, float] = {}
    for each in maps:
        for key, value in each.items():
            largest[key] = max(value, largest.get(key, value))
    return largest
