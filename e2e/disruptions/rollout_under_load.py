"""Changes a service under steady streams, and reports the effects on clients and when the status was untrue.

The rules of fault_under_load.py apply, with the setting `steady`: new streams arrive until the rollout is over, so that
streams run whenever the operator acts on an engine. All revisions serve the same weights, since their tokens are
compared.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clients.load import STRIKE_AT, StreamTokens, problem_of
from clients.service import ROOT, STATUS_SECONDS, Service, manifest, wait
from disruptions.running_load import running_load
from observers.rollout_timeline import RolloutTimeline

NUM_TOKENS = 96  # tokens of each of the first streams, which run during the change
LATE_TOKENS = 32
# Numbers of parallel streams before and after the change. They are fixed, so that a slow machine is not overloaded.
NUM_FIRST, NUM_STEADY = 4, 3
# Long enough for a busy machine: these tests check how streams end, not their speed.
DRAIN_SECONDS = 90
# Streams run for this time after the end of a rollout.
_REST_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    began: float  # Unix times
    ended: float
    what: str
    is_cut: bool  # the stream ended early, after its first token


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    what: str
    streams: list[dict[str, Any]]
    probes: list[tuple[float, float, str]]  # sent, answered, failure
    failures: list[Failure]  # failures of streams and probes, in the order of their start
    untrue_times: list[str]
    timeline: RolloutTimeline
    over_at: float

    @property
    def num_requests(self) -> int:
        return len(self.streams) + len(self.probes)

    @property
    def longest_pause(self) -> tuple[float, float]:
        """The prober's longest pause between two answers: (its seconds, its beginning in seconds from the change)."""
        answers = sorted(answered for _, answered, failure in self.probes if not failure)
        return max((later - earlier, self.timeline.seconds(earlier)) for earlier, later in itertools.pairwise(answers))

    def began_between(self, since: float, until: float) -> int:
        """The number of requests that clients sent in this time."""
        began = [*(stream["began"] for stream in self.streams), *(sent for sent, _, _ in self.probes)]
        return sum(since <= at <= until for at in began)

    def early_touches(self, old: str, new: str) -> list[str]:
        """In words: actions on engines of the revision `old` before an engine of `new` had generated a token."""
        seen = [at for engine in self.timeline.of(new) if (at := engine.token_seen_at) is not None]
        proven_at = min(seen, default=float("inf"))
        return [
            f"{engine.name}: {what} {proven_at - at:.1f} s before the new revision had made a token"
            for engine in self.timeline.of(old)
            for at, what in engine.touches
            if self.timeline.began_at <= at < proven_at
        ]

    def row(self) -> str:
        """A row of the table of rollouts. Seconds of steps count from the change."""
        timeline = self.timeline
        tokens = [at for each in timeline.engines.values() if (at := each.token_seen_at) and at > timeline.began_at]
        moments = [timeline.seconds(min(tokens)) if tokens else None]
        moments += [timeline.step_at("Analyzing"), timeline.step_at("Promoting"), timeline.step_at("RollingBack")]
        cells = [self.what, *("-" if each is None else f"{each:.1f}" for each in moments)]
        cells += [f"{timeline.seconds(self.over_at):.1f}", str(timeline.most_clusters)]
        cells += [f"{len(self.failures)} of {self.num_requests}", str(sum(each.is_cut for each in self.failures))]
        before, after = self._first_tokens()
        return "| " + " | ".join([*cells, f"{before:.2f} / {after:.2f}"]) + " |"

    def _first_tokens(self) -> tuple[float, float]:
        """Median and maximum of the streams' seconds to the first token."""
        seconds = [each["times"][0] - each["began"] for each in self.streams if each["times"]]
        return statistics.median(seconds), max(seconds)


HEADER = (
    "| change | s to a token of the new | Analyzing | Promoting | RollingBack | over | most engines | failed | cut |"
    " s to first token, median / longest |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def roll_out(
    service: Service,
    expected: StreamTokens,
    what: str,
    change: Callable[[], object],
    *,
    is_over: Callable[[], bool],
    seconds: float = 600.0,
    events: Sequence[str] = (),
    **settings: Any,
) -> RolloutRecord:
    """Calls `change` while streams run. `expected` is the result of `undisturbed` with NUM_TOKENS tokens.

    `events`: words of Events. The timeline ends only when it has these Events, because the operator creates an Event
    after it has written the status.
    """
    wait(lambda: _has_no_leaving_pods(service), DRAIN_SECONDS + STATUS_SECONDS, service.story)
    load: dict[str, Any] = {"steady": NUM_STEADY, "late_tokens": LATE_TOKENS, "strike_at": STRIKE_AT}
    load |= {"urls": [service.url] * NUM_FIRST, "num_tokens": NUM_TOKENS, "probe_url": service.url}
    with RolloutTimeline(service) as timeline, running_load(service, **(load | settings)) as running:
        running.strike(timeline, what, change)
        over_at = running.wait(timeline, is_over, seconds, 1.0)
        time.sleep(_REST_S)  # the record must include failures that the last step causes
        running.wait(timeline, lambda: timeline.is_current() and _has_events(timeline, events), STATUS_SECONDS)
    records = running.records
    assert max(records["had"]) <= NUM_TOKENS // 2, f"the change came too late: {records['had']}"
    timeline.note(timeline.began_at, "client", f"streams had {records['had']} tokens")
    return RolloutRecord(
        what=what,
        streams=records["streams"],
        probes=records["probes"],
        failures=failures_of(records["streams"], records["probes"], expected),
        untrue_times=timeline.judge_status(records["probes"], over_at),
        timeline=timeline,
        over_at=over_at,
    )


def _has_no_leaving_pods(service: Service) -> bool:
    """True if no pod of a removed engine replica exists. A timeline would count such a pod as an engine."""
    groups = {pod["metadata"]["labels"]["rayloom.dev/group"] for pod in service.pods("head")}
    return groups <= set(service.clusters())


def _has_events(timeline: RolloutTimeline, events: Sequence[str]) -> bool:
    return all(timeline.first("event", words) is not None for words in events)


def rollable(namespace: str, hold_seconds: int, min_requests: int = 20, **spec: Any) -> dict[str, Any]:
    """The manifest of a service with one rank in float32, small enough for two engines on two cores."""
    model = {"source": "builtin://smollm2-135m", "dtype": "float32"}
    engine = {"args": {"threads": 1}, "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}
    rollout = {"analysis": {"holdSeconds": hold_seconds, "minRequests": min_requests}}
    path = ROOT / "examples" / "smollm2.yaml"
    return manifest(path, namespace, model=model, engine=engine, rollout=rollout, drainSeconds=DRAIN_SECONDS, **spec)


def failures_of(
    streams: Sequence[dict[str, Any]], probes: Sequence[tuple[float, float, str]], expected: StreamTokens
) -> list[Failure]:
    found = [
        Failure(began=each["began"], ended=each["ended"], what=problem, is_cut=bool(each["tokens"]))
        for each in streams
        if (problem := problem_of(each, expected))
    ]
    found += [Failure(began=sent, ended=ended, what=what, is_cut=False) for sent, ended, what in probes if what]
    return sorted(found, key=lambda failure: failure.began)


def expect_unnoticed(seen: RolloutRecord, show: Callable[[RolloutRecord], None]) -> None:
    """Shows the record, and expects no failed request and no untrue status."""
    show(seen)
    assert [failure.what for failure in seen.failures] == []
    assert seen.untrue_times == []


def is_rolled(service: Service, old: str) -> Callable[[], bool]:
    """A predicate: all engine replicas are of another revision than `old`, and serve."""

    def is_over() -> bool:
        document = service.get()
        status, number = document["status"], document["spec"].get("replicas", 1)
        current = status.get("currentRevision")
        is_new = current not in (None, "", old) and status.get("updateRevision") == current
        return bool(is_new) and _is_whole(service, document, "Complete", number)

    return is_over


def is_rolled_back(service: Service, old: str) -> Callable[[], bool]:
    """A predicate: the spec's revision has failed, and all engine replicas are of the revision `old` and serve."""

    def is_over() -> bool:
        document = service.get()
        status, number = document["status"], document["spec"].get("replicas", 1)
        is_old = status.get("currentRevision") == old and status.get("updateRevision") != old
        return is_old and _is_whole(service, document, "RolledBack", number)

    return is_over


def _is_whole(service: Service, document: dict[str, Any], step: str, number: int) -> bool:
    status = document["status"]
    found: dict[str, Any] = next((each for each in status["conditions"] if each["type"] == "Progressing"), {})
    # Until the operator has seen the changed spec, the condition has the result of the rollout before.
    is_seen = found.get("observedGeneration") == document["metadata"]["generation"]
    is_ready = is_seen and found["reason"] == step and status["ready"] == f"{number}/{number}"
    return is_ready and len(service.clusters()) == number
