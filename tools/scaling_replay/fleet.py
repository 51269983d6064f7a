"""Replays requests on a service of simulated engines, which one rule scales, and measures latencies."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_bench.figures import percentile
from scaling_replay.engine import SimulatedEngine
from scaling_replay.rules import LOOK_S, Rule
from scaling_replay.traces import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    rule: str
    seconds_over: int  # number of seconds in which a request arrived whose first token took longer than the goal
    percent_over: float  # percentage of all requests whose first token took longer than the goal
    ttft_p50_s: float
    ttft_p99_s: float
    replica_hours: float
    most: int  # most engines at once


def replay(requests: list[Request], rule: Rule, *, start_s: float, ttft_s: float) -> Outcome:
    """Returns the outcome of a service. It begins with one engine, or with a fixed rule's number of engines.

    A request is sent to the serving engine with the fewest waiting tokens. A removed engine finishes its requests, and
    its time counts until their end.
    """
    engines = [SimulatedEngine(ready_at=0.0) for _ in range(max(1, rule.number([], 0.0)) if _is_fixed(rule) else 1)]
    ended: list[SimulatedEngine] = []
    replica_s = 0.0
    most = now = 0.0
    index = 0
    while index < len(requests) or any(each.is_busy for each in engines):
        for each in engines:
            each.run(now)
        while index < len(requests) and requests[index].at < now + LOOK_S:
            request = requests[index]
            for each in engines:
                each.run(request.at)
            _least_loaded(engines, request.at).add(request, request.at)
            index += 1
        now += LOOK_S
        for each in engines:
            each.run(now)
        ended += [each for each in engines if each.is_leaving and not each.is_busy]
        engines = [each for each in engines if not each.is_leaving or each.is_busy]
        replica_s += LOOK_S * len(engines)
        most = max(most, len(engines))
        engines += _scaled(engines, rule, now, start_s)
    return _outcome(rule.name, [*ended, *engines], ttft_s, replica_s, int(most))


def _is_fixed(rule: Rule) -> bool:
    return rule.name.startswith("fixed")


def _least_loaded(engines: list[SimulatedEngine], now: float) -> SimulatedEngine:
    serving = [each for each in engines if each.ready_at <= now and not each.is_leaving]
    return min(serving, key=lambda each: (each.queued, each.num_running))


def _scaled(engines: list[SimulatedEngine], rule: Rule, now: float, start_s: float) -> list[SimulatedEngine]:
    """Marks engines that leave, and returns those that are added."""
    staying = [each for each in engines if not each.is_leaving]
    number = rule.number(staying, now)
    # Starting engines are removed first, then the least busy engines.
    order = sorted(staying, key=lambda each: (each.ready_at <= now, each.num_running))
    for each in order[: max(0, len(staying) - number)]:
        each.is_leaving = True
    return [SimulatedEngine(ready_at=now + start_s, at=now + start_s) for _ in range(number - len(staying))]


def _outcome(name: str, engines: list[SimulatedEngine], ttft_s: float, replica_s: float, most: int) -> Outcome:
    found = [each for engine in engines for each in engine.first_tokens]
    times = [seconds for _, seconds in found]
    return Outcome(
        rule=name,
        seconds_over=len({int(at) for at, seconds in found if seconds > ttft_s}),
        percent_over=100 * sum(each > ttft_s for each in times) / len(times),
        ttft_p50_s=percentile(times, 0.5),
        ttft_p99_s=percentile(times, 0.99),
        replica_hours=replica_s / 3600,
        most=most,
    )
