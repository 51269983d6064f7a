"""Formats the figures of `bench gateway` as a table and as a page. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rayloom_bench.gateway.rounds import ServerFigures
from rayloom_bench.gateway.servers import DIRECT, GATEWAY
from rayloom_bench.markdown import NO_VALUE, table

GOAL_US = 20.0  # goal: the most microseconds of CPU time for an event
GOAL_MS = 3.0  # goal: the most milliseconds that the gateway adds to the time to the first event
TOKENS_S = 50  # tokens per second of a usual stream
_HEADER = (
    "server",
    "CPU us per event",
    "CPU us per token",
    f"streams of {TOKENS_S} tok/s per core",
    "events/s in the run",
    "first event beside the streams, p50 ms",
    "added, p50 ms",
    "first event alone, p50 ms",
    "added alone, p50 ms",
)


def figures_table(figures: Sequence[ServerFigures]) -> str:
    """A row for each server. A column `added` has the server's time minus that of DIRECT.

    DIRECT is the plain server, to which clients connect without a proxy.
    """
    direct = next((each for each in figures if each.name == DIRECT), None)
    return table(_HEADER, (_row(each, direct) for each in figures))


def _row(figures: ServerFigures, direct: ServerFigures | None) -> tuple[str, ...]:
    title = f"{figures.name} {figures.version}".strip()
    if not figures.rounds:
        return (title, *[NO_VALUE] * (len(_HEADER) - 1))
    first_ms = figures.first_event_ms
    alone_ms = figures.alone_first_event_ms
    delivered = f"{statistics.median(figures.events_s):,.0f}"
    if figures.name == DIRECT:
        return (
            title,
            NO_VALUE,
            NO_VALUE,
            NO_VALUE,
            delivered,
            f"{first_ms:.2f}",
            NO_VALUE,
            f"{alone_ms:.2f}",
            NO_VALUE,
        )
    costs = sorted(figures.event_us)
    cost = statistics.median(costs)
    added = NO_VALUE if direct is None else f"{first_ms - direct.first_event_ms:.2f}"
    added_alone = NO_VALUE if direct is None else f"{alone_ms - direct.alone_first_event_ms:.2f}"
    return (
        title,
        f"{cost:.1f} ({costs[0]:.1f} to {costs[-1]:.1f})",
        f"{statistics.median(figures.token_us):.1f}",
        f"{1e6 / cost / TOKENS_S:,.0f}"
        if cost > 0.0
        else NO_VALUE,  # a short round may use less than a tick of CPU time
        delivered,
        f"{first_ms:.2f}",
        added,
        f"{alone_ms:.2f}",
        added_alone,
    )


def verdicts(figures: Sequence[ServerFigures]) -> list[str]:
    """Returns a sentence for each goal of the gateway: the goal, the figure, and the verdict."""
    by_name = {each.name: each for each in figures}
    gateway = by_name[GATEWAY]
    cost = statistics.median(gateway.event_us)
    added = gateway.first_event_ms - by_name[DIRECT].first_event_ms
    alone = gateway.alone_first_event_ms - by_name[DIRECT].alone_first_event_ms
    return [
        f"Goal: at most {GOAL_US:g} us of CPU time for an event; {cost:.1f} us, {_verdict(cost <= GOAL_US)}.",
        f"Goal: less than {GOAL_MS:g} ms added before the first event; beside the streams {added:.2f} ms, "
        f"{_verdict(added < GOAL_MS)}.",
        f"Goal: the same without other requests; {alone:.2f} ms, {_verdict(alone < GOAL_MS)}.",
    ]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def page(conditions: str, workload: str, figures: Sequence[ServerFigures]) -> str:
    """The whole page."""
    parts = [
        "# CPU time of the gateway for a streamed event",
        "Written by `rayloom-engine bench gateway --page docs/benchmarks`.",
        conditions,
        workload,
        figures_table(figures),
        "\n".join(f"- {sentence}" for sentence in verdicts(figures)),
        "## What each server does",
        "The gateway gets token ids from simulated engines, which speak the protocol of real ones. It keeps the ids "
        "for a continuation, turns them into text, looks for stop strings and the parts of a message, and writes "
        "events. The proxies copy finished events from a plain server. CPU time is that of the server's process "
        "alone, user and system. If other processes delay a server, it sends several tokens in one event: the cost of "
        "an event is then too high, and that of a token too low. The kernel charges the delivery of a loopback packet "
        "to its sender.",
        "Clients, simulated engines and the measured server share the cores of this machine. All streams of an engine "
        "get their events in the same moment, so a single request that comes then waits until the server has written "
        "them and the clients have read them. The columns *alone* have the time of the server itself.",
    ]
    return "\n\n".join(parts) + "\n"
