"""Causes a fault while a client's pod receives streams, and reports the effects on the clients.

The rules: Clients do not retry. From the fault on, new requests arrive until the first streams have ended, or, with the
setting `steady`, until the fault is over. The fault happens when every stream has at least 16 of its tokens and at most
half of them. Weights are float32. The docstring of clients/load.py tells when a request has failed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients.load import STRIKE_AT, StreamTokens, problem_of
from clients.service import READY_SECONDS, STATUS_SECONDS, Service, wait
from disruptions.running_load import running_load
from observers.timeline import Timeline

HEADER = (
    "| fault | s to the next token of a running stream | s to Available | failed requests | failed probes |",
    "|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """The observations of clients during a fault. Seconds count from the fault."""

    streams: list[dict[str, Any]]
    failures: list[str]  # failed requests, in words; empty if clients noticed no more than a pause
    failed_probes: list[tuple[float, float, str]]  # Unix time of the request, Unix time of the failure, its reason
    num_requests: int
    tokens_s: float  # seconds until the next token of a running stream
    available_s: float | None  # seconds until Available was True again; None when it was never False
    timeline: Timeline
    untrue_times: list[str]

    @property
    def probe_failures(self) -> list[str]:
        return [failure for _, _, failure in self.failed_probes]

    def table(self) -> str:
        return self.timeline.table()

    def row(self, what: str) -> str:
        """A row of the table of faults."""
        again = "never False" if self.available_s is None else f"{self.available_s:.1f}"
        tokens = f"{self.tokens_s:.1f}" if self.tokens_s > 0 else "-"
        return (
            f"| {what} | {tokens} | {again} | {len(self.failures)} of {self.num_requests} |"
            f" {len(self.probe_failures)} |"
        )


def disturb(
    service: Service,
    expected: StreamTokens,
    what: str,
    strike: Callable[[], object],
    *,
    is_over: Callable[[], bool],
    seconds: float = 300.0,
    mend: Callable[[Timeline], None] | None = None,
    **settings: Any,
) -> FaultRecord:
    """Calls `strike` while streams run, by the rules above.

    `expected` is the result of `undisturbed`. Returns when every request has ended, the service is Available, and
    `is_over()` is true. `strike` may return the Unix time of the fault. `mend` is called right after `strike`.
    """
    wait(service.is_available, READY_SECONDS, lambda: json.dumps(service.get().get("status"), indent=1))
    num_tokens = len(expected[0])
    load = {"num_tokens": num_tokens, "strike_at": STRIKE_AT, "probe_url": service.url, **settings}
    with Timeline(service) as timeline, running_load(service, **load) as running:
        running.strike(timeline, what, strike)
        if mend is not None:
            mend(timeline)
        if not settings.get("steady"):
            running.wait_for_streams()
        over_at = running.wait(timeline, lambda: is_over() and service.is_available(), seconds)
        running.wait(timeline, timeline.is_current, STATUS_SECONDS)
    return _seen(service, expected, timeline, running.records, over_at)


def _seen(
    service: Service, expected: StreamTokens, timeline: Timeline, records: dict[str, Any], over_at: float
) -> FaultRecord:
    began, streams = timeline.began_at, records["streams"]
    half = len(expected[0]) // 2
    assert max(records["had"]) <= half, f"the fault came too late:\n{timeline.table()}\n{records['had']}"
    timeline.note(began, "client", f"streams had {min(records['had'])} to {max(records['had'])} tokens")
    failures = [problem for stream in streams if (problem := problem_of(stream, expected))]
    recoveries = [each for each in service.engine_status()["recoveries"] if each["at"] >= began - 1.0]
    # Some ranks outlive the fault by seconds: ranks in a deleted pod, and ranks whose Ray node has lost its control
    # store. The first streams may end in these seconds.
    felt_at = max(began, recoveries[0]["at"]) if recoveries else began
    running = [each for each in streams if each["began"] <= felt_at < each["ended"]]
    assert running, f"nobody waited when it was felt:\n{timeline.table()}"
    tokens_at = min(_end_of_pause(each["times"], max(began, each["began"])) for each in running)
    failed_probes = [(sent, answered, failure) for sent, answered, failure in records["probes"] if failure]
    if tokens_at > began:
        timeline.note(tokens_at, "client", "the next token of a stream")
    for recovery in recoveries:
        timeline.note(recovery["at"], "engine", f"{recovery['process']} on {recovery['node']}: {recovery['cause']}")
        timeline.note(recovery["at"] + (recovery["seconds"] or 0.0), "engine", f"{recovery['process']} recovered")
    for failure, group in itertools.groupby(failed_probes, key=lambda probe: probe[2]):
        same = list(group)
        timeline.note(same[0][1], "probe", f"{failure}: {len(same)}, until {timeline.seconds(same[-1][1]):.1f} s")
    was_lost = [at for at, is_available in timeline.available if not is_available and at >= began]
    back = [at for at, is_available in timeline.available if is_available and was_lost and at > was_lost[-1]]
    return FaultRecord(
        streams=streams,
        failures=failures,
        failed_probes=failed_probes,
        num_requests=len(streams),
        tokens_s=tokens_at - began,
        available_s=back[-1] - began if back else None,
        timeline=timeline,
        untrue_times=timeline.judge_status(records["probes"], over_at),
    )


def _end_of_pause(times: list[float], since: float) -> float:
    """The end of the longest pause after `since`. Tokens that were in transit at the fault arrive before this pause."""
    moments = [since, *(moment for moment in times if moment > since)]
    return max(itertools.pairwise(moments), key=lambda pause: pause[1] - pause[0], default=(since, since))[1]
